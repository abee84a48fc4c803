"""How a program does what the model's shapes ask for: what it reads twice, pads, replicates, and how many kernels."""

import dataclasses
import enum


class Head(enum.Enum):
    """Where the vocabulary's tables are."""

    SHARDED = "sharded"  # each rank scores its share of the vocabulary; the embedding is all-reduced
    REPLICATED = "replicated"  # each rank has all of both tables, and communicates for neither


class Scored(enum.Enum):
    """Which of a prompt's positions a prefill scores."""

    LAST = "last"
    ALL = "all"


class Cache(enum.Enum):
    """Which positions attention works on."""

    FILLED = "filled"  # those that there are: the causal half of a prompt, a decode step's own past
    PADDED = "padded"  # prompt and new tokens, always, filled or masked


class Readers(enum.Enum):
    """How often attention reads a key/value head's cache."""

    KEYS = "keys"  # once
    QUERIES = "queries"  # once for each query head that shares it


@dataclasses.dataclass(frozen=True)
class Launches:
    """Kernels started for: a norm; a matrix product; turning queries and keys and writing the cache; scores, softmax
    and values; the MLP's activation; adding the partial sums of joint sublayers; after the last layer."""

    norm: int = 1
    matmul: int = 1
    rotate: int = 2
    attend: int = 3
    activate: int = 1
    join: int = 1
    last: int = 10


@dataclasses.dataclass(frozen=True)
class Implementation:
    """score_bytes: memory traffic for each score of a prefill's attention, 0 where they stay on the chip.

    cache_speed: how fast the cache is read, over how fast weights are: above 1 where re-reads hit a cache of the chip.
    fused: joint sublayers share one norm and one product into queries, keys, values, gate and up, whatever the
        residual's name says. one_row: where there is a single token in all, matrix products fuse with their neighbours.
    small_all_reduces: a step's reductions of a few bytes beside the sublayers', to choose the next token.
    """

    name: str
    head: Head
    scored: Scored
    cache: Cache
    readers: Readers
    score_bytes: int
    launches: Launches
    one_row: Launches
    fused: bool = False
    cache_speed: float = 1.0
    small_all_reduces: int = 0


OURS = Implementation(
    "ours",
    head=Head.SHARDED,
    scored=Scored.LAST,
    cache=Cache.FILLED,
    readers=Readers.KEYS,
    score_bytes=0,
    launches=Launches(attend=4),
    one_row=Launches(attend=4),
    small_all_reduces=2,
)
"""This library's programs. Launches as counted in an H100's schedule of a decode step that never communicates: 9 in
attention, 4 in an MLP, 10 besides (`ladder-jax overlap --target h100:8 --residual no-communication --phase decode`)."""

AUTHORS = Implementation(
    "authors",
    head=Head.REPLICATED,
    scored=Scored.ALL,
    cache=Cache.PADDED,
    readers=Readers.QUERIES,
    score_bytes=12,
    launches=Launches(matmul=2),
    one_row=Launches(activate=0),
    fused=True,
    cache_speed=1.13,
)
"""The benchmark of arXiv 2501.06589, https://github.com/mayank31398/ladder-residual-inference, in compiled PyTorch.

Keys and values are repeated for each query head, a mask covers the padded cache, scores are in memory (written, read
twice and written by the softmax, read, and their mask). Matrix products of several rows are library calls that split
the sum and add it up in a second kernel; those of one row are generated, with the activation in them (PyTorch's
`coordinate_descent_tuning`). cache_speed is fitted: python -m experiments.predict.
"""

ALL = {one.name: one for one in (OURS, AUTHORS)}
