"""The section `train`: the recipe, what is kept of a run, and what becomes of bad steps."""

import dataclasses
import enum

from ladder_jax.config.schema.checks import check, check_positive
from ladder_jax.config.schema.execution import Loop
from ladder_jax.config.schema.typed import fit


class Remat(enum.Enum):
    """What the backward pass keeps. The reduced sums are kept under every policy (see residual/layers.py)."""

    NONE = "none"  # keep every activation
    FULL = "full"  # recompute the layer from its input
    SAVE_MATMULS = "save-matmuls"  # keep matmul results, recompute the rest
    OFFLOAD = "offload"  # as full, but what is kept, each layer's input and the reduced sums, lies in the host's memory


class OnBadStep(enum.Enum):
    """What becomes of a step whose loss or gradient is no number, or whose loss jumps (see train/bad_steps.py)."""

    STOP = "stop"
    SKIP = "skip"  # the batch changes nothing, and training goes on
    ROLLBACK = "rollback"  # back to the last checkpoint, and on without the batches that led there


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The recipe of the paper (section 4.1), with AdamW and a cosine to a tenth of the peak.

    `start`: a checkpoint whose weights, and tokenizer, training begins with; empty for new weights. What the file
    says of `model` may be its topology alone then.
    """

    start: str | None = None
    freeze: int = 0  # the embedding and so many of the lowest layers stay as they are
    steps: int = 25_000
    batch: int = 2048  # sequences a step, over all devices
    sequence: int = 2048  # predicted tokens a sequence
    learning_rate: float = 3e-4
    final_learning_rate_fraction: float = 0.1
    warmup_steps: int = 2_000
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-10
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    loop: Loop = Loop.SCAN
    remat: Remat = Remat.NONE
    accumulate: int = 1  # parts of the batch that a device computes one after another, for its memory
    sequence_parallel: bool = False  # split the stream between sublayers along the sequence, over mesh.tensor
    z_loss: float = 0.0  # times log(Z)^2 of the softmax's denominator Z; PaLM's is 1e-4
    loss_chunk: int = 2048  # tokens whose logits a device holds at once
    log_every: int = 10
    evaluate_every: int = 1_000  # 0: only after the last step
    evaluation_batches: int = 8  # of held-out text
    checkpoint_every: int = 1_000
    keep_checkpoints: int = 3  # the newest
    keep_every: int = 0  # also every step that it divides
    keep_best: int = 0  # also those with the lowest held-out loss
    on_bad_step: OnBadStep = OnBadStep.STOP
    spike_factor: float = 0.0  # a loss that many times the recent mean is bad; 0: only what is no number
    spike_window: int = 50  # steps of that mean; before there are as many, no loss is too high
    max_bad_steps: int = 10  # in a row, or returns to one checkpoint, before the run stops all the same
    rollback_batches: int = 100  # up to the bad one, that are left out after a return
    peak_tflops: float | None = None  # of one device, for the MFU; empty: by a table

    def __post_init__(self):
        fit(self, "train")
        check_positive(self, "train", "steps", "batch", "sequence", "learning_rate", "eps", "clip_norm")
        check_positive(self, "train", "accumulate", "loss_chunk")
        check(self.freeze >= 0, f"train.freeze must not be negative, not {self.freeze}")
        check(self.z_loss >= 0, f"train.z_loss must not be negative, not {self.z_loss}")
        check_positive(self, "train", "log_every", "checkpoint_every", "keep_checkpoints", "evaluation_batches")
        check_positive(self, "train", "spike_window", "max_bad_steps", "rollback_batches")
        for name in ("evaluate_every", "keep_every", "keep_best"):
            check(getattr(self, name) >= 0, f"train.{name} must not be negative, not {getattr(self, name)}")
        check(
            not self.keep_best or (self.evaluate_every and self.checkpoint_every % self.evaluate_every == 0),
            f"train.keep_best={self.keep_best} needs a held-out loss at every checkpoint: train.checkpoint_every="
            f"{self.checkpoint_every} must be a multiple of train.evaluate_every={self.evaluate_every}",
        )
        check(
            self.spike_factor == 0 or self.spike_factor > 1,
            f"train.spike_factor must be above 1, or 0 for none, not {self.spike_factor}",
        )
        if self.peak_tflops is not None:
            check_positive(self, "train", "peak_tflops")
        check(self.warmup_steps >= 0, f"train.warmup_steps must not be negative, not {self.warmup_steps}")
        check(self.weight_decay >= 0, f"train.weight_decay must not be negative, not {self.weight_decay}")
        check(0 <= self.seed < 2**32, f"train.seed must be between 0 and 2**32 - 1, not {self.seed}")
        for name in ("beta1", "beta2", "final_learning_rate_fraction"):
            check(0 <= getattr(self, name) <= 1, f"train.{name} must be between 0 and 1, not {getattr(self, name)}")
