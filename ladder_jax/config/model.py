"""The section `model`: a decoder, the names of its residual topologies, and the presets, shapes by
name; and how the programs of a model are executed.
"""

import dataclasses
import enum
import json
import numbers
import pathlib
import re
from collections.abc import Sequence
from typing import Annotated

from ladder_jax.config.fields import Count, Few, Positive, Section, build, check, check_type
from ladder_jax.config.model_sections import MoEConfig, SideConfig
from ladder_jax.errors import UserError, unknown

RESIDUALS = (
    "standard",
    "ladder",
    "ladder-2",
    "ladder-fresh",
    "parallel",
    "parallel-shared-norm",
    "parallel-ladder",
    "desync-2",
    "no-communication",
)
"""Of every model."""
EXPERT_RESIDUALS = ("farskip",)
"""Of models with experts only."""


@dataclasses.dataclass(frozen=True)
class ResidualName:
    """kind: the name without its number; number: the delay of a ladder, the period of a desync."""

    kind: str
    number: int = 1

    @property
    def is_ladder(self) -> bool:
        return self.kind in ("ladder", "ladder-fresh", "parallel-ladder", "farskip")

    @property
    def depends_on_ranks(self) -> bool:
        """Whether another number of tensor-parallel ranks makes it another function."""
        return self.kind in ("ladder-fresh", "desync")

    @property
    def reduces_every_output(self) -> bool:
        """Whether every sublayer's output is summed over the ranks."""
        return self.kind not in ("desync", "no-communication")


def parse_residual(name: str) -> ResidualName:
    """Of any name in RESIDUALS and EXPERT_RESIDUALS, `ladder-K` and `desync-N`, with numbers from 1
    to 999.

    Raises UserError for any other.
    """
    check_type("residual", name, str)
    numbered = re.fullmatch(r"(ladder|desync)-([1-9]\d{0,2})", name)
    if numbered:
        return ResidualName(numbered[1], int(numbered[2]))
    if name in (*RESIDUALS, *EXPERT_RESIDUALS):
        return ResidualName(name)
    raise unknown("residual", name, (*RESIDUALS, *EXPERT_RESIDUALS, "ladder-K", "desync-N"))


def _as_text(which: object) -> object:
    """2, (0, 2) and [0, 2] as text for `layer_indices`, "2" and "0,2,"; any other value
    unchanged.
    """
    if isinstance(which, list | tuple | range):
        return ",".join(map(str, which)) + ","
    return (
        str(which) if isinstance(which, numbers.Integral) and not isinstance(which, bool) else which
    )


def layer_indices(which: str | int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The 0-based layers that `which` names: `"N"` or N the last N, `"i,j"`, `"i,"` or [i, j] a
    list, `"all"`.
    """
    which = _as_text(which)
    check_type("ladder_layers", which, str)
    if which == "all":
        return tuple(range(num_layers))
    refused = UserError(
        f"ladder_layers={which!r} is no choice of layers (allowed: N for the last N of {num_layers} layers, a list"
        f" i,j of 0 to {num_layers - 1}, or all; auto:N for a conversion alone)"
    )
    try:
        given = [int(part) for part in which.split(",") if part.strip()]
    except ValueError:
        raise refused from None
    if "," in which:
        layers = sorted(given)
    elif len(given) == 1 and 0 <= given[0] <= num_layers:
        layers = [*range(num_layers - given[0], num_layers)]
    else:
        raise refused
    if len(set(layers)) < len(layers) or not set(layers) <= set(range(num_layers)):
        raise refused
    return tuple(layers)


class Dtype(enum.Enum):
    """`Dtype("float32")`; also made from NumPy's and jax's types, such as `jnp.float32` or an
    array's dtype.
    """

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @classmethod
    def _missing_(cls, value: object) -> "Dtype | None":
        name = getattr(value, "name", None) or getattr(value, "__name__", None)
        return next((one for one in cls if one.value == name), None)


class QKNorm(enum.Enum):
    """Over which elements the RMS norms of queries and keys run."""

    NONE = False  # there are none
    HEAD = True  # those of a head (Qwen3)
    # those of all heads, which are split over the ranks: one more, small collective a layer (OLMoE)
    ALL = "all-heads"

    def __bool__(self) -> bool:
        return self is not QKNorm.NONE


class Biases(enum.Enum):
    """Which matmuls carry a bias."""

    NONE = "none"
    QKV = "qkv"  # Qwen2
    ATTENTION = "attention"  # Llama with attention_bias
    ALL = "all"  # Llama with attention_bias and mlp_bias


@dataclasses.dataclass(frozen=True, repr=False)
class RopeScaling(Section):
    """Llama 3's frequency scaling (https://arxiv.org/abs/2407.21783, section 3.4)."""

    factor: Positive = 8.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_context: Count = 8192

    NAME = "model.rope_scaling"


@dataclasses.dataclass(frozen=True, repr=False)
class ModelConfig(Section):
    """A Llama-family decoder, dense or with experts (`moe`), its residual topology, and a network
    beside it (`side`).

    `ladder_layers` makes a hybrid: `"N"` the last N layers, `"i,j"` 0-based layers, `"all"`; or a
    number, or a list. `ranks`: for the topologies whose function depends on the number of
    tensor-parallel ranks (ladder-fresh, desync-n); empty: the mesh's.
    """

    num_layers: Few = 4
    d_model: Count = 128
    num_heads: Count = 8
    num_kv_heads: Count = 4
    head_dim: Count | None = None  # empty: d_model / num_heads
    d_ff: Count = 352  # of the MLP, which with `moe` only `moe.dense_layers` have
    vocab_size: Count = 256
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: Positive = 1e-5
    tie_embeddings: bool = False
    biases: Biases = Biases.NONE
    qk_norm: QKNorm = QKNorm.NONE
    moe: MoEConfig | None = None
    side: SideConfig | None = None
    residual: str = "ladder"
    ladder_layers: str | None = None
    ranks: Count | None = None
    dtype: Dtype = Dtype.BFLOAT16  # of matmuls and of the sublayers' all-reduces
    residual_dtype: Dtype = Dtype.BFLOAT16

    NAME = "model"

    def __post_init__(self):
        object.__setattr__(self, "ladder_layers", _as_text(self.ladder_layers))
        super().__post_init__()

    def _check(self) -> None:
        if self.head_dim is None:
            check(
                self.d_model % self.num_heads == 0,
                f"model.num_heads={self.num_heads} does not divide model.d_model={self.d_model}"
                " (or set model.head_dim)",
            )
            object.__setattr__(self, "head_dim", self.d_model // self.num_heads)
        check(self.head_dim % 2 == 0, f"model.head_dim must be even, not {self.head_dim}")
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}",
        )
        name = parse_residual(self.residual)
        if self.ladder_layers is not None:
            check(
                name.is_ladder,
                f"model.ladder_layers needs a ladder kind of residual, not {self.residual!r}",
            )
            layer_indices(self.ladder_layers, self.num_layers)
        check(
            self.ranks is None or name.depends_on_ranks,
            f"model.ranks belongs to ladder-fresh and desync-n, not to {self.residual!r}",
        )
        self._check_experts(name)
        if self.side is not None:
            self.side.check(self)

    def _check_experts(self, name: ResidualName) -> None:
        check(
            self.moe is not None or self.residual not in EXPERT_RESIDUALS,
            f"model.residual={self.residual!r} needs experts (model.moe); of a dense model it is 'ladder'",
        )
        if self.moe is None:
            return
        check(
            not name.depends_on_ranks,
            f"model.residual={self.residual!r} gives each rank another input, by which ranks would choose other experts"
            " (allowed with model.moe: standard, ladder, ladder-K, parallel, parallel-ladder, farskip)",
        )
        dense = self.moe.dense_layers
        check(
            dense < self.num_layers,
            f"model.moe.dense_layers={dense} leaves none of {self.num_layers} layers experts",
        )
        check(
            self.biases is not Biases.ALL,
            "model.biases='all' has biases in the MLP, which experts have not (allowed with model.moe: none, qkv,"
            " attention)",
        )


_SHAPES = json.loads(pathlib.Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
"""By name, what differs from ModelConfig's defaults. The paper's own models, ladder-*, have
multi-head attention and StarCoder's vocabulary.
"""

PRESETS = tuple(_SHAPES)


def preset_fields(name: str) -> dict:
    """The fields of a preset that differ from ModelConfig's defaults; raises UserError for an
    unknown name.
    """
    if name not in _SHAPES:
        raise unknown("preset", name, PRESETS)
    return dict(_SHAPES[name])


def changed(base: dict, changes: dict) -> dict:
    """`base` with other values; of a section below it, such as `moe`, the fields that `changes`
    leaves out stay.
    """
    both = {
        name: base[name] | fields
        for name, fields in changes.items()
        if isinstance(fields, dict) and isinstance(base.get(name), dict)
    }
    return {**base, **changes, **both}


def recipe(name: str) -> dict:
    """The preset's own settings of the section `train`; empty where they are the defaults, the
    paper's recipe.
    """
    if name not in ("tiny", "tiny-moe"):
        return {}
    return dict(
        steps=300,
        batch=16,
        sequence=128,
        learning_rate=4e-3,
        warmup_steps=30,
        checkpoint_every=100,
        evaluate_every=100,
    )


def preset(name: str, **changes) -> ModelConfig:
    """The model configuration called `name`, with any field changed:
    `preset("tiny", residual="standard")`.
    """
    return build(ModelConfig, changed(preset_fields(name), changes), "model.")


# How the programs of a model are executed.


class Loop(enum.Enum):
    """How the layers are iterated: one compiled body, or one copy of the body a layer."""

    SCAN = "scan"
    UNROLLED = "unrolled"


class Remat(enum.Enum):
    """What the backward pass keeps. The reduced sums are kept under every policy (see
    residual/loop.py).
    """

    NONE = "none"  # keep every activation
    FULL = "full"  # recompute the layer from its input
    SAVE_MATMULS = "save-matmuls"  # keep matmul results, recompute the rest
    # as full, with each layer's input and the reduced sums in the host's memory
    OFFLOAD = "offload"


class CollectiveMatmul(enum.Enum):
    """How sequence parallelism's gathers and scatters that no other sublayer hides stand beside
    their own matmuls.
    """

    NONE = "none"  # before and after them
    RING = "ring"  # rings of permutes under the matmul's chunks (see parallel/ring.py)


class Phase(enum.Enum):
    """What a program is for."""

    PREFILL = "prefill"  # blocks of tokens, forward only
    DECODE = "decode"  # one token a row: reductions of a few KiB to a few MiB
    TRAIN = "train"


class Launch(enum.Enum):
    """How a reduction is launched beside compute and awaited after it."""

    AUTO = "auto"  # explicit where it is supported, otherwise chained
    # whole, chained by barriers: the compiler chooses when; differentiable, everywhere
    CHAINED = "chained"
    # in two halves, around a whole sublayer: residual/wires/async_all_reduce.py
    EXPLICIT = "explicit"


class Interleave(enum.Enum):
    """In how many parts, in turn, a batch is computed."""

    WHOLE = 1
    HALVES = 2  # one half's sums under the other's compute: residual/interleave.py
    # halves where they are predicted to be faster: the commands decide (predict/halves.py)
    AUTO = "auto"

    @classmethod
    def _missing_(cls, value: object) -> "Interleave | None":
        return next((one for one in cls if str(one.value) == value), None)

    @property
    def parts(self) -> int:
        """1 or 2. Raises UserError for AUTO, which only the commands know how to decide."""
        if self is Interleave.AUTO:
            raise UserError(
                "interleave=auto is decided by the commands train, generate and serve: give 1 or 2 here"
            )
        return self.value


type Parts = Annotated[
    int, (lambda value: value in (1, 2), "be 1 (the whole batch) or 2 (two halves of it in turn)")
]


@dataclasses.dataclass(frozen=True, repr=False)
class Execution(Section):
    """How a forward pass is executed, and the backward pass of it: whatever this says, the function
    is the same.

    sequence_parallel: between sublayers a rank keeps T/ranks positions of the stream
        (residual/wires/sequence.py).
    interleave: 2 takes two halves of the rows, or of one row's positions, in turn
        (residual/interleave.py).
    """

    loop: Loop = Loop.SCAN
    remat: Remat = Remat.NONE
    launch: Launch = Launch.CHAINED
    sequence_parallel: bool = False
    collective_matmul: CollectiveMatmul = CollectiveMatmul.NONE
    interleave: Parts = 1


SCANNED = Execution()
UNROLLED = Execution(loop=Loop.UNROLLED)


def check_execution(
    execution: Execution, *, model: ModelConfig, rows: int, splits: bool = False
) -> None:
    """Raises UserError for an execution that is none of this model's on a device of `rows` rows.
    splits: whether the stream is split along the sequence.
    """
    form = execution.collective_matmul
    if form is not CollectiveMatmul.NONE:
        check(
            execution.sequence_parallel,
            "collective_matmul=ring needs sequence_parallel: without it no gather stands before a matmul",
        )
        check(
            not model.residual.startswith("parallel"),
            f"collective_matmul=ring: attention and MLP of {model.residual} share one gather",
        )
        check(
            model.moe is None,
            "collective_matmul=ring: experts (model.moe) sort their rows, which no ring brings",
        )
    if execution.interleave == 1:
        return
    check(
        rows % 2 == 0 or not splits,
        f"interleave=2 halves the rows of a split stream on each device: {rows} is an odd number",
    )
    check(
        parse_residual(model.residual).reduces_every_output,
        f"interleave=2 is for a residual that reduces every sublayer's output, not {model.residual}",
    )
    check(
        model.residual != "farskip" or not model.moe.shared_width,
        "interleave=2 is not for farskip with a shared expert, which is reduced with attention",
    )
    check(
        form is CollectiveMatmul.NONE,
        f"interleave=2 hides gathers and scatters, of which collective_matmul={form.value} leaves none",
    )
