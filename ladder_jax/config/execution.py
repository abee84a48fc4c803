"""Choices that several sections and the library itself share: how a program is built, and what it
computes in.
"""

import dataclasses
import enum

from ladder_jax.errors import UserError


class Dtype(enum.Enum):
    """`Dtype("float32")`; also made from NumPy's and jax's types, such as `jnp.float32` or an
    array's dtype.
    """

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @classmethod
    def _missing_(cls, value: object) -> "Dtype | None":
        name = getattr(getattr(value, "dtype", value), "name", None) or getattr(
            value, "__name__", value
        )
        name = {"bf16": "bfloat16", "fp32": "float32"}.get(str(name), name)
        return next((one for one in cls if one.value == name), None)


class QKNorm(enum.Enum):
    """Over which elements the RMS norms of queries and keys run."""

    NONE = False  # there are none
    HEAD = True  # those of a head (Qwen3)
    # those of all heads, which are split over the ranks: one more, small collective a layer (OLMoE)
    ALL = "all-heads"

    def __bool__(self) -> bool:
        return self is not QKNorm.NONE


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
    COMPILER = "compiler"  # as XLA for TPUs turns them into loops of permutes, by its own options
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


@dataclasses.dataclass(frozen=True)
class Execution:
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
    interleave: int = 1

    def __post_init__(self):
        check_interleave(self.interleave)


def check_interleave(interleave: int, *, name: str = "interleave") -> None:
    """Raises UserError for another number than 1 and 2."""
    if interleave not in (1, 2):
        raise UserError(
            f"{name} must be 1 (the whole batch) or 2 (two halves of it in turn), not {interleave!r}"
        )


SCANNED, UNROLLED = Execution(), Execution(loop=Loop.UNROLLED)
