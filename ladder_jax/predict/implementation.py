"""Properties of a program that the model's shapes do not determine: padding, replication, repeated reads, kernels."""

import dataclasses
import enum

from ladder_jax.predict.link import ANY, FITTED, Algorithm


class Head(enum.Enum):
    """How the embedding and the head's table are distributed."""

    SHARDED = "sharded"  # over the vocabulary; the embedding's output is all-reduced
    REPLICATED = "replicated"  # on every rank; neither needs communication


class Scored(enum.Enum):
    """The positions of a prompt for which a prefill computes logits."""

    LAST = "last"
    ALL = "all"


class Cache(enum.Enum):
    """The cached positions that attention processes."""

    FILLED = "filled"  # the filled ones: the causal half of a prompt, the past of a decode step
    PADDED = "padded"  # always all positions of prompt and new tokens, with a mask


class CacheReads(enum.Enum):
    """How often attention reads the cache of a key/value head."""

    PER_KEY_HEAD = "per key head"  # once
    PER_QUERY_HEAD = "per query head"  # once for each query head that shares it


@dataclasses.dataclass(frozen=True)
class Launches:
    """Numbers of kernels.

    norm: of a norm. matmul: of a matrix product. rotate: of rotary embeddings and of writes to the cache.
    attend: of scores, softmax and values. activate: of the MLP's activation.
    join: of the addition of a joint step's two partial sums. last: after the last layer.
    route: of a router, from its logits to the sorted rows' places.
    """

    norm: int = 1
    matmul: int = 1
    rotate: int = 2
    attend: int = 3
    activate: int = 1
    join: int = 1
    last: int = 10
    route: int = 12


@dataclasses.dataclass(frozen=True)
class Implementation:
    """How a program runs the model.

    score_bytes: memory traffic per attention score in a prefill; 0 if scores stay on the chip.
    launches: kernels per operation. one_row: likewise for a single token, where a compiler fuses matrix products with
        their neighbours.
    fused: whether joint sublayers share one norm and one matrix product, regardless of the residual's name.
    cache_speed: bandwidth of reading the cache over that of reading weights; above 1 if repeated reads hit an on-chip
        cache.
    small_all_reduces: reductions of a few bytes per step, for the choice of the next token.
    algorithms: the all-reduces that it may use. With FITTED it is a given program: `program.programs` offers no other.
    """

    name: str
    head: Head
    scored: Scored
    cache: Cache
    cache_reads: CacheReads
    score_bytes: int
    launches: Launches
    one_row: Launches
    fused: bool = False
    cache_speed: float = 1.0
    small_all_reduces: int = 0
    algorithms: tuple[Algorithm, ...] = ANY


OURS = Implementation(
    "ours",
    head=Head.SHARDED,
    scored=Scored.LAST,
    cache=Cache.FILLED,
    cache_reads=CacheReads.PER_KEY_HEAD,
    score_bytes=0,
    launches=Launches(attend=4),
    one_row=Launches(attend=4),
    small_all_reduces=2,
)
"""This library's programs. The launches were counted in the H100 schedule of a decode step without communication: 9 in
attention, 4 in an MLP, 10 elsewhere (`ladder-jax overlap --target h100:8 --residual no-communication --phase decode`).
Those of experts in that of qwen3-30b-a3b, whose grouped matmuls are kernels: 18, of them 12 before rows are sorted.
"""

AUTHORS = Implementation(
    "authors",
    head=Head.REPLICATED,
    scored=Scored.ALL,
    cache=Cache.PADDED,
    cache_reads=CacheReads.PER_QUERY_HEAD,
    score_bytes=12,
    launches=Launches(matmul=2),
    one_row=Launches(activate=0),
    fused=True,
    cache_speed=1.13,
    algorithms=FITTED,
)
"""The benchmark of arXiv 2501.06589, https://github.com/mayank31398/ladder-residual-inference, in compiled PyTorch.

Keys and values are repeated for each query head, and a mask covers the padded cache. Scores are in memory: they are
written, read twice and written by the softmax, and read again, and their mask is read. A matrix product of several rows
is a library call with split-K, so a second kernel adds up the parts; for one row PyTorch generates a kernel that
includes the activation (`coordinate_descent_tuning`). cache_speed is fitted: python -m experiments.predict.
"""

ALL = {one.name: one for one in (OURS, AUTHORS)}
