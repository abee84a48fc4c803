"""Attention of a block of tokens: the kernel for a device, what the block's positions write to the
key/value cache and attend to, and its rotary angles.
"""

import dataclasses
import enum
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from ladder_jax.config import Dtype, ModelConfig
from ladder_jax.parallel.collectives import differentiable, is_v5e, pvary, unchecked, varying

BLOCK = 512  # cached positions whose scores `extend` holds at once
# positions that a paged cache is read by, and a divisor of its heads' size: whole tiles in every
# dtype
PAGE = 128


class Kernel(enum.Enum):
    XLA = "xla"  # everywhere; scores in memory
    CUDNN = "cudnn"  # flash attention on NVIDIA GPUs
    # flash attention on TPUs, for whole blocks; a decode step's one query uses XLA
    SPLASH = "splash"
    # for blocks as splash; a decode step reads the cache up to each row's length, and no more
    PAGED = "paged"

    @property
    def cache_dims(self) -> str:
        """The order in which a cache is kept: B rows, S positions, N key/value heads, H head
        size.
        """
        return "BNSH" if self is Kernel.PAGED else "BSNH"

    @property
    def page(self) -> int:
        """A cache's capacity is a multiple of it."""
        return PAGE if self is Kernel.PAGED else 1


def choose(config: ModelConfig, *, mesh: Mesh) -> Kernel:
    """The kernel for the mesh's devices (which need not be this machine's: ahead-of-time
    compilation).
    """
    device = mesh.devices.flat[0]
    low_precision = config.dtype is Dtype.BFLOAT16
    if device.platform == "tpu":
        # v5e: 13 % more estimated cycles with it, where the reductions need the same vector memory.
        paged = low_precision and config.head_dim % PAGE == 0 and not is_v5e(device.device_kind)
        return Kernel.PAGED if paged else Kernel.SPLASH
    if device.platform in ("gpu", "cuda") and low_precision and config.head_dim % 8 == 0:
        # cuDNN asks the driver while it is traced, so it needs a GPU on this very machine.
        if config.head_dim <= 128 and device in jax.devices():
            return Kernel.CUDNN
    return Kernel.XLA


def causal(
    query: Array, key: Array, value: Array, *, kernel: Kernel, segments: Array | None = None
) -> Array:
    """Attention of a block to itself, each position to those before it and itself.

    query [B, T, N, H], key and value [B, T, K, H] with K dividing N; the result is as query.
    segments: [B, T] integers; a position sees only those of its own number. None: all are of one.
    """
    if kernel in (Kernel.SPLASH, Kernel.PAGED):
        from ladder_jax.nn import tpu_attention  # Pallas is for TPUs only, and slow to import

        return tpu_attention.causal(query, key, value, segments=segments)
    attend = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=kernel.value
    )
    call = differentiable(attend) if kernel is Kernel.CUDNN else attend
    if segments is None:
        return call(query, key, value)
    # jax keeps cuDNN's own packed layout private. A mask costs it [B, 1, T, T] in memory, of the
    # compute dtype, and its gradient is for even lengths.
    same = (segments[:, :, None] == segments[:, None, :])[:, None]
    if kernel is Kernel.XLA or query.shape[1] % 2:
        return jax.nn.dot_product_attention(
            query, key, value, mask=same, is_causal=True, implementation="xla"
        )

    def masked(query, key, value, mask):
        return attend(query, key, value, mask=mask)

    return differentiable(masked, fixed=1)(query, key, value, same)


def extend(query: Array, key: Array, value: Array, start: Array, *, kernel: Kernel) -> Array:
    """Attention of a block at positions start..start+T-1 to a cache that holds it and all before
    it.

    query [B, T, N, H], the cache's key and value [B, S, K, H] (in the kernel's order) with K
    dividing N, start an int32 scalar; query t sees the positions up to start + t. The result is as
    query. Not differentiable.
    """
    if kernel in (Kernel.SPLASH, Kernel.PAGED):
        from ladder_jax.nn import tpu_attention

        def heads_first(x):
            return x if kernel.cache_dims == "BNSH" else x.swapaxes(1, 2)

        return tpu_attention.extend(query, heads_first(key), heads_first(value), start)
    # cuDNN's causal mask begins at the cache's first position, and jax rounds the log-sum-exp by
    # which two calls' results could be joined to bfloat16; a bias could mask, but makes cuDNN read
    # the cache's unused end too.
    return _blockwise(query, key, value, start)


def _blockwise(query, key, value, start):
    """`extend` by an online softmax (arXiv 1805.02867): scores of BLOCK positions at a time,
    [B, K, N/K, T, BLOCK].
    """
    rows, length, heads, head_dim = query.shape
    _, capacity, kv_heads, _ = key.shape
    block = min(BLOCK, capacity)
    positions = start + jnp.arange(length)
    # heads that share keys in a row
    grouped = query.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def turn(index, carry):
        total, weighed, highest = carry
        # The last block ends where the cache does, and leaves out what the one before it has seen.
        first = jnp.minimum(index * block, capacity - block)
        keys = jax.lax.dynamic_slice_in_dim(key, first, block, axis=1)
        values = jax.lax.dynamic_slice_in_dim(value, first, block, axis=1)
        columns = first + jnp.arange(block)
        seen = columns[None, :] <= positions[:, None]
        seen = seen & (columns >= index * block)[None, :]
        scores = dot("BTKGH,BSKH->BKGTS", grouped, keys) * head_dim**-0.5
        scores = jnp.where(seen[None, None, None], scores, -jnp.inf)
        # Finite from the first block on, as every query sees position 0.
        top = jnp.maximum(highest, scores.max(-1))
        weights = jnp.exp(scores - top[..., None])
        kept = jnp.exp(highest - top)
        values = dot("BKGTS,BSKH->BKGTH", weights.astype(value.dtype), values)
        total = total * kept + weights.sum(-1)
        weighed = weighed * kept[..., None] + values
        return total, weighed, top

    axes = varying(query) | varying(key) | varying(value)
    shape = (rows, kv_heads, heads // kv_heads, length)

    def empty(fill, *more):
        return pvary(jnp.full((*shape, *more), fill, jnp.float32), axes)

    # Blocks beyond the last query are not even visited: half of the work, from a long prompt's
    # first token to its last. The price is a loop that XLA cannot count: a GPU's host asks after
    # every turn whether there is another.
    blocks = (start + length + block - 1) // block
    start = empty(0.0), empty(0.0, head_dim), empty(-jnp.inf)
    total, weighed, _ = jax.lax.fori_loop(0, blocks, turn, start)
    attended = (weighed / total[..., None]).astype(query.dtype)
    return jnp.moveaxis(attended, 3, 1).reshape(query.shape)


def decode(query: Array, key: Array, value: Array, lengths: Array, *, kernel: Kernel) -> Array:
    """Attention of one position a row (query [B, 1, N, H]) to the first `lengths` [B] of the cache.

    Its key and value are [B, S, K, H], in the kernel's order.
    """
    if kernel is Kernel.PAGED:
        from ladder_jax.nn import tpu_attention

        return tpu_attention.decode(query, key, value, lengths.astype(jnp.int32), page=PAGE)
    implementation = "xla" if kernel is Kernel.SPLASH else kernel.value

    def attend(query, key, value, lengths):
        return jax.nn.dot_product_attention(
            query, key, value, key_value_seq_lengths=lengths, implementation=implementation
        )

    call = unchecked(attend) if kernel is Kernel.CUDNN else attend
    return call(query, key, value, lengths.astype(jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """One layer's keys and values, each a rank's [B, S, K, H] in the order of its kernel's
    `cache_dims`.

    Row b is filled up to its length.
    """

    key: Array
    value: Array


class Positions:
    """A block's positions, and attention at them.

    ends: int32 [B], where each row's tokens end and padding begins; None: nowhere, or where it does
        not matter.
    """

    ends: Array | None = None

    def halves(self, rows: int) -> tuple["Positions", "Positions"]:
        """Those of the first `rows` rows and of the others, whose cache is one."""

    def parts(self, at: int) -> tuple["Positions", "Positions"]:
        """Those of every row's first `at` positions and of the later ones, which attend to the
        first, too.
        """

    def indices(self, length: int) -> Array:
        """Those of a block of `length` tokens, [B, length] or, the same for all rows,
        [1, length].
        """

    def attend(
        self, query: Array, key: Array, value: Array, *, cache: Cache | None, kernel: Kernel
    ) -> tuple[Array, Cache | None]:
        """(attention's output, shaped as the query; the cache with the block's keys and values).

        A rank's query [B, T, N, H], key and value [B, T, K, H].
        """


@dataclasses.dataclass(frozen=True)
class FullSequence(Positions):
    """Positions 0..T-1. Nothing precedes them, so a cache is written and not read; without one
    nothing is written.

    row: the first one's place in the cache. leaves: without a cache, what is `Left` to the later
        part of the rows.
    begins: [B, T] int32, of `Packed` rows, which hold several documents: where in the row each
        position's document begins, which tells it from all others.
    """

    ends: Array | None = None
    row: int = 0
    leaves: bool = False
    begins: Array | None = None

    def indices(self, length):
        index = jnp.arange(length)[None, :]
        return index if self.begins is None else index - self.begins

    def attend(self, query, key, value, *, cache, kernel):
        if cache is not None:
            cache = _write(cache, key, value, row=self.row, start=0, kernel=kernel)
        elif self.leaves:
            cache = Left(key, value)
        return causal(query, key, value, kernel=kernel, segments=self.begins), cache

    def halves(self, rows):
        def half(part, row):
            ends, begins = jax.tree.map(lambda a: a[part], (self.ends, self.begins))
            return FullSequence(ends, row, begins=begins)

        return half(slice(rows), self.row), half(slice(rows, None), self.row + rows)

    def parts(self, at):
        begins = None if self.begins is None else self.begins[:, :at]
        first = FullSequence(row=self.row, leaves=True, begins=begins)
        return first, LaterPart(at, self.begins, self.row)


FULL_SEQUENCE = FullSequence()


def Packed(segments: Array | None) -> FullSequence:
    """Rows of several documents, for training, runs of equal numbers in `segments` [B, T]. Each
    attends only to itself, and starts at position 0. None: a row is one.
    """
    if segments is None:
        return FULL_SEQUENCE
    index = jnp.arange(segments.shape[1])
    index = jnp.broadcast_to(index[None, :], segments.shape)
    changes = segments[:, 1:] != segments[:, :-1]
    first = jnp.pad(changes, ((0, 0), (1, 0)))
    return FullSequence(begins=jax.lax.cummax(jnp.where(first, index, 0), axis=1))


@dataclasses.dataclass(frozen=True)
class ChunkedPrefill(Positions):
    """Positions start..start+T-1 of every row; the cache holds those before, and must have room for
    these.

    start: an int32 scalar. row: the first one's place in the cache.
    """

    start: Array
    row: int = 0

    def indices(self, length):
        return self.start + jnp.arange(length)[None, :]

    def attend(self, query, key, value, *, cache, kernel):
        cache = _write(cache, key, value, row=self.row, start=self.start, kernel=kernel)
        rows = slice(self.row, self.row + len(query))
        attended = extend(query, cache.key[rows], cache.value[rows], self.start, kernel=kernel)
        return attended, cache

    def halves(self, rows):
        return ChunkedPrefill(self.start, self.row), ChunkedPrefill(self.start, self.row + rows)

    def parts(self, at):
        return self, ChunkedPrefill(self.start + at, self.row)


class Left(NamedTuple):
    """A first part's keys and values, in the place of a cache where there is none: the later part
    reads them.
    """

    key: Array
    value: Array


@dataclasses.dataclass(frozen=True)
class LaterPart(Positions):
    """The positions from `start` on of rows whose first part has left its keys and values, or
    written them to a cache.

    begins: [B, T] of packed rows, as FullSequence has them. row: the first one's place in the cache.
    Without a cache the scores are whole in memory, [B, N, T - start, T]: no kernel here has a
    gradient for a mask that begins later.
    """

    start: int
    begins: Array | None = None
    row: int = 0

    def indices(self, length):
        index = self.start + jnp.arange(length)[None, :]
        return index if self.begins is None else index - self.begins[:, self.start :]

    def attend(self, query, key, value, *, cache, kernel):
        if not isinstance(cache, Left):
            chunk = ChunkedPrefill(jnp.int32(self.start), self.row)
            return chunk.attend(query, key, value, cache=cache, kernel=kernel)
        keys = jnp.concatenate([cache.key, key], axis=1)
        values = jnp.concatenate([cache.value, value], axis=1)
        index = jnp.arange(keys.shape[1])
        seen = (index[None, :] <= index[self.start :, None])[None]
        if self.begins is not None:
            later = self.begins[:, self.start :]
            seen = seen & (later[:, :, None] == self.begins[:, None, :])
        attended = jax.nn.dot_product_attention(
            query, keys, values, mask=seen[:, None], implementation="xla"
        )
        return attended, None


@dataclasses.dataclass(frozen=True)
class DecodeStep(Positions):
    """One token a row (T is 1), at row b's position `lengths[b]`: [B] int32, how many positions the
    cache holds.
    """

    lengths: Array

    def indices(self, length):
        return self.lengths[:, None]

    def attend(self, query, key, value, *, cache, kernel):
        # a row's heads, where these come first
        here = (slice(None),) * (kernel.cache_dims.index("S") - 1)

        # vmap, as XLA for GPUs aborts on the constants of an index of rows, among operations in
        # program order.
        @jax.vmap
        def write(row, length, new):
            return row.at[*here, length].set(new, unique_indices=True)

        keys = write(cache.key, self.lengths, key[:, 0])
        values = write(cache.value, self.lengths, value[:, 0])
        cache = Cache(keys, values)
        return decode(query, cache.key, cache.value, self.lengths + 1, kernel=kernel), cache


def _write(cache, key, value, *, row, start, kernel):
    place = [jnp.int32({"B": row, "S": start}.get(dim, 0)) for dim in kernel.cache_dims]

    def write(into, block):
        block = block if kernel.cache_dims == "BSNH" else block.swapaxes(1, 2)
        return jax.lax.dynamic_update_slice(into, block, place)

    return Cache(write(cache.key, key), write(cache.value, value))


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position, [H/2], in float64: rotary position embedding (arXiv 2104.09864)."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    plain = config.rope_theta**-exponents
    return plain if config.rope_scaling is None else _llama3(plain, config.rope_scaling)


def _llama3(plain, scaling):
    """Llama 3's stretch (arXiv 2407.21783): slow rotations by `factor`, fast ones not, a ramp
    between.
    """
    turns = scaling.original_context * plain / (2 * math.pi)
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling.factor


def rotary_tables(positions: Array, *, config: ModelConfig) -> tuple[Array, Array]:
    """Cosines and sines [B, T, H/2], float32, for `positions` [B, T]; made once for all layers."""
    frequencies = jnp.asarray(rotary_frequencies(config)[None, None, :], jnp.float32)
    angles = positions[:, :, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, table: tuple[Array, Array]) -> Array:
    """x [B, T, heads, H] turned by its positions' angles: dimension i pairs with i + H/2."""
    cos, sin = (part[:, :, None, :] for part in table)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    first = left * cos - right * sin
    second = right * cos + left * sin
    return jnp.concatenate([first, second], axis=-1).astype(x.dtype)
