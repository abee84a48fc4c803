"""What can be set: frozen dataclasses, validated as they are made. Imports no jax."""

import dataclasses
import enum

from ladder_jax.config import residual_names
from ladder_jax.errors import UserError


class Biases(enum.Enum):
    """Which matmuls carry a bias."""

    NONE = "none"
    QKV = "qkv"  # Qwen2
    ATTENTION = "attention"  # Llama with attention_bias
    ALL = "all"  # Llama with attention_bias and mlp_bias


class Dtype(enum.Enum):
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Loop(enum.Enum):
    """How the layers are iterated: one compiled body, or one copy of the body a layer."""

    SCAN = "scan"
    UNROLLED = "unrolled"


class Phase(enum.Enum):
    """What a program is for."""

    PREFILL = "prefill"  # blocks of tokens, forward only
    DECODE = "decode"  # one token a row: reductions of a few KiB to a few MiB
    TRAIN = "train"


class Launch(enum.Enum):
    """How a reduction is launched beside compute and awaited after it."""

    CHAINED = "chained"  # by barriers that the compiler must respect; differentiable, everywhere
    EXPLICIT = "explicit"  # by name (see parallel/explicit.py); decoding on GPUs


class Quantize(enum.Enum):
    """How the matrices are stored for decoding; compute stays in the model's dtype."""

    NONE = "none"  # in the compute dtype
    INT8 = "int8"  # 8 bits, one scale an output channel


class Remat(enum.Enum):
    """What the backward pass keeps. The reduced sums are kept under every policy (see residual.py)."""

    NONE = "none"  # keep every activation
    FULL = "full"  # recompute the layer from its input
    SAVE_MATMULS = "save-matmuls"  # keep matmul results, recompute the rest


class OnBadStep(enum.Enum):
    """What becomes of a step whose loss or gradient is no number, or whose loss jumps (see train/policy.py)."""

    STOP = "stop"
    SKIP = "skip"  # the batch changes nothing, and training goes on
    ROLLBACK = "rollback"  # back to the last checkpoint, and on without the batches that led there


class OnDamaged(enum.Enum):
    """What a run does that finds its newest checkpoint damaged."""

    STOP = "stop"
    PREVIOUS = "previous"  # puts it aside, and goes on from the newest whole one


def check(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def check_positive(config: object, section: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(value > 0, f"{section}.{name} must be positive, not {value}")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (https://arxiv.org/abs/2407.21783, section 3.4)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self):
        check_positive(self, "model.rope_scaling", *(f.name for f in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A dense Llama-family decoder and its residual topology.

    `ladder_layers` makes a hybrid: `"N"` the last N layers, `"i,j"` 0-based layers, `"all"`.
    `ranks` belongs to the topologies whose function depends on the number of tensor-parallel
    ranks (ladder-fresh, desync-n); left empty, it is taken from the mesh.
    """

    num_layers: int = 4
    d_model: int = 128
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int | None = None  # empty: d_model / num_heads
    d_ff: int = 352
    vocab_size: int = 256
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    biases: Biases = Biases.NONE
    qk_norm: bool = False
    residual: str = "ladder"
    ladder_layers: str | None = None
    ranks: int | None = None
    dtype: Dtype = Dtype.BFLOAT16  # of matmuls and of the sublayers' all-reduces
    residual_dtype: Dtype = Dtype.BFLOAT16

    def __post_init__(self):
        check_positive(self, "model", "num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff")
        check_positive(self, "model", "vocab_size", "rope_theta", "norm_eps")
        if self.head_dim is None:
            check(
                self.d_model % self.num_heads == 0,
                f"model.num_heads={self.num_heads} does not divide model.d_model={self.d_model}"
                " (or set model.head_dim)",
            )
            object.__setattr__(self, "head_dim", self.d_model // self.num_heads)
        check(self.head_dim > 0 and self.head_dim % 2 == 0, f"model.head_dim must be even, not {self.head_dim}")
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}",
        )
        name = residual_names.parse(self.residual)
        if self.ladder_layers is not None:
            check(name.is_ladder, f"model.ladder_layers needs a ladder kind of residual, not {self.residual!r}")
            residual_names.layer_indices(self.ladder_layers, self.num_layers)
        if self.ranks is not None:
            check(self.ranks > 0, f"model.ranks must be positive, not {self.ranks}")
            check(name.depends_on_ranks, f"model.ranks belongs to ladder-fresh and desync-n, not to {self.residual!r}")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices an axis: data x fsdp x tensor."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        check_positive(self, "mesh", "data", "fsdp", "tensor")

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.tensor


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The recipe of the paper (section 4.1), with AdamW and a cosine to a tenth of the peak."""

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
        check_positive(self, "train", "steps", "batch", "sequence", "learning_rate", "eps", "clip_norm")
        check_positive(self, "train", "accumulate", "loss_chunk")
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


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # only the k most probable tokens; 0: all
    top_p: float = 1.0  # only the most probable tokens that together reach p; 1: all
    min_p: float = 0.0  # only tokens at least p times as probable as the most probable one; 0: all
    repetition_penalty: float = 1.0  # above 1, what the prompt and the text hold becomes less likely
    seed: int = 0
    prefill_chunk: int = 2048  # longer prompts are read in blocks of as many tokens, to bound memory
    loop: Loop = Loop.UNROLLED
    launch: Launch = Launch.CHAINED
    quantize: Quantize = Quantize.NONE

    def __post_init__(self):
        check_positive(self, "decode", "max_new_tokens", "prefill_chunk")
        for name in ("temperature", "top_k"):
            check(getattr(self, name) >= 0, f"decode.{name} must not be negative, not {getattr(self, name)}")
        check(0 < self.top_p <= 1, f"decode.top_p must be above 0 and at most 1, not {self.top_p}")
        check(0 <= self.min_p <= 1, f"decode.min_p must be between 0 and 1, not {self.min_p}")
        check_positive(self, "decode", "repetition_penalty")
        check(0 <= self.seed < 2**32, f"decode.seed must be between 0 and 2**32 - 1, not {self.seed}")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """`path`: a text file, a folder of them, or `stdlib` for the source of Python's own library; or what
    `ladder-jax tokenize` made, or a .yaml file with a mixture of those (see data/mixture.py).

    `max_bytes`, `tokenizer` (`bytes`, or a folder with a Hugging Face tokenizer.json): of text; a token store
    has been tokenized already.
    """

    path: str = "stdlib"
    tokenizer: str = "bytes"
    max_bytes: int = 32_000_000
    validation_fraction: float = 0.05

    def __post_init__(self):
        check_positive(self, "data", "max_bytes")
        check(
            0 < self.validation_fraction < 1,
            f"data.validation_fraction must be between 0 and 1, not {self.validation_fraction}",
        )


@dataclasses.dataclass(frozen=True)
class FolderConfig:
    """`dir`: the run's folder; empty for `runs/<name>`. `wandb`: a project of Weights & Biases to log to."""

    name: str = "run"
    dir: str | None = None
    on_damaged: OnDamaged = OnDamaged.STOP
    tensorboard: bool = True
    wandb: str | None = None


@dataclasses.dataclass(frozen=True)
class RunConfig:
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()
    decode: DecodeConfig = DecodeConfig()
    data: DataConfig = DataConfig()
    run: FolderConfig = FolderConfig()

    def __post_init__(self):
        check_fits_mesh(self.model, self.mesh)
        rows = self.mesh.data * self.mesh.fsdp
        check(
            self.train.batch % rows == 0,
            f"train.batch={self.train.batch} is not divisible by the mesh's data x fsdp = {rows}",
        )
        check(
            not self.train.sequence_parallel or self.train.sequence % self.mesh.tensor == 0,
            f"train.sequence_parallel splits train.sequence={self.train.sequence} positions over mesh.tensor="
            f"{self.mesh.tensor} ranks, which does not divide them",
        )
        check(
            self.train.batch // rows % self.train.accumulate == 0,
            f"train.accumulate={self.train.accumulate} does not divide a device's {self.train.batch // rows} rows"
            f" (train.batch={self.train.batch} over data x fsdp = {rows})",
        )


def check_fits_mesh(model: ModelConfig, mesh: MeshConfig) -> None:
    """Refuse a mesh over which the model's dimensions cannot be split."""
    ranks = mesh.tensor if model.ranks is None or mesh.tensor > 1 else model.ranks
    check(model.d_model % mesh.fsdp == 0, f"model.d_model={model.d_model} is not divisible by mesh.fsdp={mesh.fsdp}")
    for name in ("num_heads", "d_ff"):
        value = getattr(model, name)
        check(value % ranks == 0, f"model.{name}={value} is not divisible by mesh.tensor={ranks}")
    kv = model.num_kv_heads
    check(
        kv % ranks == 0 or ranks % kv == 0,
        f"model.num_kv_heads={kv} and mesh.tensor={ranks}: one must divide the other",
    )
    check(
        model.ranks is None or mesh.tensor in (1, model.ranks),
        f"this {model.residual} model is a function of model.ranks={model.ranks} ranks;"
        f" mesh.tensor={mesh.tensor} computes another one (allowed: 1, {model.ranks})",
    )
