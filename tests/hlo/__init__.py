"""Small programs as real compilers scheduled them (`compiled.as_text()`): three layers of two
sublayers, pairs of matmuls. Without what the reader does not read, by `python -m tests.hlo.record`
at commit 2620443e; compiled by `python -m tests.hlo.generate` at commit 22e2e364.
"""

import pathlib

from ladder_jax.schedule import hlo

FOLDER = pathlib.Path(__file__).parent
T = 512
D = 2048
F = 16384
RANKS = 8
SUBLAYERS = 6
SUBLAYER = 2 * 2 * T * D * F / RANKS  # FLOPs: two matmuls, 2 a multiply-add
# Ladders
UNROLLED = ["h100-unrolled", "h100-halves", "tpu7x-unrolled", "v5p-unrolled", "v5e-unrolled"]


def text(name):
    return (FOLDER / f"{name}.hlo").read_text()


def parsed(name):
    return hlo.parse(text(name))
