"""How a program is built: choices that several sections and the library itself share."""

import enum


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
