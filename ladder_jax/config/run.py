"""The sections `mesh`, `data`, `train`, `decode` and `run`, and all sections together, checked
against each other.
"""

import dataclasses
import enum
import math

from ladder_jax.config.fields import (
    Count,
    CountOrZero,
    Decay,
    Factor,
    FactorOrZero,
    Few,
    Penalty,
    Positive,
    PositiveOrZero,
    Section,
    Seed,
    Share,
    check,
    passes,
)
from ladder_jax.config.model import (
    CollectiveMatmul,
    Execution,
    Interleave,
    Launch,
    Loop,
    ModelConfig,
    Remat,
    check_execution,
    parse_residual,
)
from ladder_jax.config.model_sections import ExpertParallelism, check_exchange
from ladder_jax.config.retrain import ConversionConfig, DistillConfig, LoraConfig, check_retraining
from ladder_jax.errors import UserError


@dataclasses.dataclass(frozen=True, repr=False)
class MeshConfig(Section):
    """Devices an axis: data x fsdp x tensor; and how experts, which are split over tensor, are
    reached.
    """

    data: Count = 1
    fsdp: Count = 1
    tensor: Count = 1
    experts: ExpertParallelism = ExpertParallelism.REDUCE

    NAME = "mesh"

    @property
    def axes(self) -> dict[str, int]:
        return dict(data=self.data, fsdp=self.fsdp, tensor=self.tensor)

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.tensor


def check_fits_mesh(model: ModelConfig, mesh: MeshConfig) -> None:
    """Raises UserError for a mesh over which the model's dimensions cannot be split."""
    ranks = mesh.tensor if model.ranks is None or mesh.tensor > 1 else model.ranks
    check(
        model.d_model % mesh.fsdp == 0,
        f"model.d_model={model.d_model} is not divisible by mesh.fsdp={mesh.fsdp}",
    )
    widths = {} if model.moe is None else {"moe.shared_width": model.moe.shared_width}
    widths |= dict(d_ff=model.d_ff) if model.moe is None or model.moe.dense_layers else {}
    split = dict(num_heads=model.num_heads) | widths
    kv = model.num_kv_heads
    shares = lambda n: kv % n == 0 or n % kv == 0
    wrong = [
        f"model.{name}={value} is not divisible by mesh.tensor={ranks}"
        for name, value in split.items()
        if value % ranks
    ]
    if not shares(ranks):
        wrong.append(f"model.num_kv_heads={kv} and mesh.tensor={ranks}: one must divide the other")
    if wrong:
        most = math.gcd(*split.values())
        fits = [n for n in range(1, min(most, 1024) + 1) if most % n == 0 and shares(n)]
        raise UserError(f"{wrong[0]} (allowed: {', '.join(map(str, fits))})")
    check(
        mesh.fsdp == 1 or mesh.tensor == ranks,
        f"model.ranks={ranks} on mesh.tensor={mesh.tensor} are emulated on one device, whose weights mesh.fsdp="
        f"{mesh.fsdp} cannot split (allowed: mesh.tensor={ranks}, or mesh.data in place of mesh.fsdp)",
    )
    check(
        model.ranks is None or mesh.tensor in (1, model.ranks),
        f"this {model.residual} model is a function of model.ranks={model.ranks} ranks;"
        f" mesh.tensor={mesh.tensor} computes another one (allowed: 1, {model.ranks})",
    )


def check_tensor(model: ModelConfig, *, tensor: int, devices: int, where: str) -> None:
    """Of the command line's `--tensor`: raises UserError if the model cannot be split over so many
    of the devices of `where`.
    """
    fits = lambda n: passes(check_fits_mesh, model, MeshConfig(tensor=n))
    allowed = list(filter(fits, range(1, devices + 1)))
    check(
        tensor in allowed,
        f"--tensor {tensor} does not split this model over {where}, of {devices} devices"
        f" (allowed: {', '.join(map(str, allowed))})",
    )


class Format(enum.Enum):
    """The format of `data.path`."""

    TEXT = "text"  # text, a token store, or a mixture: every token is predicted
    # JSON lines of chats, prompts with completions, and texts (see data/examples.py)
    EXAMPLES = "examples"


@dataclasses.dataclass(frozen=True, repr=False)
class DataConfig(Section):
    """`path`: a text file, a folder of them (hidden ones apart), or `stdlib` for the source of
    Python's own library; or what `ladder-jax tokenize` made, which may be in gs:// or s3://, or a
    .yaml file with a mixture of those (see data/dataset.py).

    `max_bytes`, `tokenizer` (`bytes`, or a folder with a Hugging Face tokenizer.json): of text
    alone, since a token store is tokenized.

    `format`: `examples` for JSON lines, a file or a folder of them, of which only the answers are
        trained on.
    """

    path: str = "stdlib"
    tokenizer: str = "bytes"
    max_bytes: Count = 32_000_000
    validation_fraction: float = 0.05
    format: Format = Format.TEXT

    NAME = "data"

    def _check(self) -> None:
        check(
            0 < self.validation_fraction < 1,
            f"data.validation_fraction must be between 0 and 1, not {self.validation_fraction}",
        )


class OnBadStep(enum.Enum):
    """What happens at a bad step: its loss or gradient is not finite, or its loss jumps (see
    train/session.py).
    """

    STOP = "stop"
    SKIP = "skip"  # the batch changes nothing, and training goes on
    # return to the last checkpoint, and leave out the batches that led to the bad step
    ROLLBACK = "rollback"


@dataclasses.dataclass(frozen=True, repr=False)
class TrainConfig(Section):
    """The recipe of the paper (section 4.1), with AdamW and a cosine to a tenth of the peak.

    `start`: a checkpoint whose weights and tokenizer training begins with; empty: new weights.
    Fields that the section `model` leaves out are then that checkpoint's.
    """

    start: str | None = None
    # above 0, the embedding and this many of the lowest layers are not trained
    freeze: CountOrZero = 0
    steps: Count = 25_000
    batch: Count = 2048  # sequences a step, over all devices
    sequence: Count = 2048  # predicted tokens a sequence
    learning_rate: Factor = 3e-4
    final_learning_rate_fraction: Share = 0.1
    warmup_steps: CountOrZero = 2_000
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Factor = 1e-10
    weight_decay: FactorOrZero = 0.1
    clip_norm: Positive = 1.0
    seed: Seed = 0
    loop: Loop = Loop.SCAN
    remat: Remat = Remat.NONE
    accumulate: Count = 1  # parts of a batch, computed one after another to save memory
    # split the stream between sublayers along the sequence, over mesh.tensor
    sequence_parallel: bool = False
    # of sequence_parallel's exposed gathers and scatters
    collective_matmul: CollectiveMatmul = CollectiveMatmul.NONE
    interleave: Interleave = Interleave.WHOLE  # 2: two halves of each device's rows in turn
    z_loss: FactorOrZero = 0.0  # times log(Z)^2 of the softmax's denominator Z; PaLM's is 1e-4
    # of experts: times the Switch loss, which is 1 where all have the same load
    load_balance: FactorOrZero = 0.01
    router_z_loss: FactorOrZero = 0.001  # of experts: times log(Z)^2 of the routers' softmaxes
    # with model.moe.router_bias: a step's change; 0 keeps the biases
    router_bias_rate: FactorOrZero = 0.001
    loss_chunk: Count = 2048  # tokens whose logits a device holds at once
    log_every: Count = 10
    evaluate_every: CountOrZero = 1_000  # 0: only after the last step
    evaluation_batches: Count = 8  # of held-out text
    checkpoint_every: Count = 1_000
    keep_checkpoints: Count = 3  # the newest
    keep_every: CountOrZero = 0  # also every step that this number divides
    keep_best: CountOrZero = 0  # also this many with the lowest held-out loss
    on_bad_step: OnBadStep = OnBadStep.STOP
    # a loss above this many times the recent mean is bad; 0: only one that is not finite
    spike_factor: float = 0.0
    spike_window: Few = 50  # steps in that mean; during the first ones no loss is too high
    # the run stops after more than so many in a row, or rollbacks to one checkpoint
    max_bad_steps: Count = 10
    rollback_batches: Count = 100  # batches up to the bad one that a rollback leaves out
    peak_tflops: Positive | None = None  # of one device, for the MFU; empty: by a table

    NAME = "train"

    def _check(self) -> None:
        check(
            not self.keep_best
            or (self.evaluate_every and self.checkpoint_every % self.evaluate_every == 0),
            f"train.keep_best={self.keep_best} needs a held-out loss at every checkpoint: train.evaluate_every="
            f"{self.evaluate_every} must divide train.checkpoint_every={self.checkpoint_every}",
        )
        check(
            self.spike_factor == 0 or self.spike_factor > 1,
            f"train.spike_factor must be above 1, or 0 for none, not {self.spike_factor}",
        )
        tokens = self.batch * self.sequence
        check(
            tokens < 2**31, f"train.batch x train.sequence must be below 2**31 tokens, not {tokens}"
        )

    @property
    def execution(self) -> Execution:
        return Execution(
            loop=self.loop,
            remat=self.remat,
            sequence_parallel=self.sequence_parallel,
            collective_matmul=self.collective_matmul,
            interleave=self.interleave.parts,
        )


class Quantize(enum.Enum):
    """How the matrices are stored for decoding; compute stays in the model's dtype."""

    NONE = "none"  # in the compute dtype
    INT8 = "int8"  # 8 bits, one scale an output channel


MOST = dict(max_new_tokens=2**31 - 1, top_k=2**31 - 1, temperature=1e30)
"""Of decoding: larger integers are no int32; larger temperatures have no further effect, and could
overflow.
"""


@dataclasses.dataclass(frozen=True, repr=False)
class DecodeConfig(Section):
    max_new_tokens: Count = 128
    temperature: PositiveOrZero = 0.0  # 0: greedy
    top_k: CountOrZero = 0  # only the k most probable tokens; 0: all
    top_p: float = 1.0  # only the most probable tokens that together reach p; 1: all
    min_p: Share = 0.0  # only tokens at least p times as probable as the most probable one; 0: all
    # above 1, tokens of the prompt and of the text so far become less likely
    repetition_penalty: Penalty = 1.0
    seed: Seed = 0
    # longer prompts are read in blocks of this many tokens, to bound memory
    prefill_chunk: Count = 2048
    interleave: Interleave = Interleave.WHOLE  # 2: prompts are read in two halves in turn
    loop: Loop = Loop.UNROLLED
    launch: Launch = Launch.AUTO  # of all-reduces, in prefill and decode
    quantize: Quantize = Quantize.NONE

    NAME = "decode"

    def _check(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            check(value <= most, f"decode.{name} must be at most {most}, not {value}")
        check(0 < self.top_p <= 1, f"decode.top_p must be above 0 and at most 1, not {self.top_p}")
        check(
            self.interleave is Interleave.WHOLE or self.prefill_chunk > 1,
            "decode.prefill_chunk=1 has no halves: decode.interleave must be 1",
        )


class OnDamaged(enum.Enum):
    """What happens when a run's newest checkpoint is damaged."""

    STOP = "stop"
    PREVIOUS = "previous"  # rename it, and resume from the newest undamaged one


@dataclasses.dataclass(frozen=True, repr=False)
class FolderConfig(Section):
    """`dir`: the run's folder, which may be gs://bucket/folder or s3://bucket/folder; empty for
    `runs/<name>`.

    `wandb`: a project of Weights & Biases to log to. `profiler_port`: process i offers jax's
        profiler on this port + i.
    """

    name: str = "run"
    dir: str | None = None
    on_damaged: OnDamaged = OnDamaged.STOP
    tensorboard: bool = True
    wandb: str | None = None
    profiler_port: int | None = None

    NAME = "run"

    def _check(self) -> None:
        port = self.profiler_port
        check(
            port is None or 0 < port < 2**16,
            f"run.profiler_port must be between 1 and 65535, not {port}",
        )


@dataclasses.dataclass(frozen=True, repr=False)
class RunConfig(Section):
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()
    decode: DecodeConfig = DecodeConfig()
    data: DataConfig = DataConfig()
    run: FolderConfig = FolderConfig()
    distill: DistillConfig = DistillConfig()
    conversion: ConversionConfig = ConversionConfig()
    lora: LoraConfig = LoraConfig()

    def _check(self) -> None:
        check_fits_mesh(self.model, self.mesh)
        if self.retrains or self.model.side is not None:
            check_retraining(self)
        train = self.train
        model = self.model
        tensor = self.mesh.tensor
        rows = self.mesh.data * self.mesh.fsdp
        of_device = train.batch // rows
        split = train.sequence_parallel
        check(
            train.batch % rows == 0,
            f"train.batch={train.batch} is not divisible by the mesh's data x fsdp = {rows}",
        )
        check(
            not split or train.sequence % tensor == 0,
            f"train.sequence_parallel splits train.sequence={train.sequence} positions over mesh.tensor={tensor}"
            " ranks, which does not divide them",
        )
        check(
            not split or tensor == 1 or parse_residual(model.residual).reduces_every_output,
            f"train.sequence_parallel reduces and splits every sublayer's output, which {model.residual} does not"
            " (allowed: standard, ladder, ladder-K, ladder-fresh, parallel, parallel-shared-norm, parallel-ladder,"
            " farskip)",
        )
        if self.mesh.experts is ExpertParallelism.EXCHANGE:
            check_exchange(model.moe, residual=model.residual, sequence_parallel=split)
        check(
            of_device % train.accumulate == 0,
            f"train.accumulate={train.accumulate} does not divide a device's {of_device} rows (train.batch="
            f"{train.batch} over data x fsdp = {rows})",
        )
        # what `auto` chooses is checked where it is chosen
        execution = Execution(
            sequence_parallel=split,
            collective_matmul=train.collective_matmul,
            interleave=2 if train.interleave is Interleave.HALVES else 1,
        )
        rows = of_device // train.accumulate
        check_execution(execution, model=model, rows=rows, splits=split and tensor > 1)

    @property
    def retrains(self) -> bool:
        """Whether a run starts from a checkpoint, or a section of retraining is set: more than
        plain pretraining.
        """
        train = self.train
        return bool(
            train.start
            or train.freeze
            or self.lora.rank
            or self.distill.teacher
            or self.conversion.steps
        )

    @property
    def without_effect(self) -> list[str]:
        """A line for each section of retraining that is set, but not switched on."""
        switches = {"lora": "rank", "distill": "teacher", "conversion": "steps"}
        lines = []
        for name, switch in switches.items():
            section = getattr(self, name)
            if section != getattr(RunConfig, name) and not getattr(section, switch):
                lines.append(f"{section} has no effect without {name}.{switch}")
        return lines
