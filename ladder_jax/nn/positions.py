"""The positions of a block of tokens: what it writes to the key/value cache and attends to, and its rotary angles."""

import dataclasses
import math
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ladder_jax.config import ModelConfig
from ladder_jax.errors import UserError
from ladder_jax.nn import kernels


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """One layer's keys and values, each a rank's [B, S, K, H] in the order of its kernel's `cache_dims`.

    Row b is filled up to its length.
    """

    key: jax.Array
    value: jax.Array


class Positions(Protocol):
    """A block's positions, and attention at them.

    ends: int32 [B], where each row's tokens end and padding begins; None: nowhere, or where it does not matter.
    """

    ends: jax.Array | None

    def halves(self, rows: int) -> tuple["Positions", "Positions"]:
        """Those of the first `rows` rows and of the others, whose cache is one."""

    def parts(self, at: int) -> tuple["Positions", "Positions"]:
        """Those of every row's first `at` positions and of the later ones, which attend to the first, too."""

    def indices(self, length: int) -> jax.Array:
        """Those of a block of `length` tokens, [B, length] or, the same for all rows, [1, length]."""

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *, cache: Cache | None, kernel: kernels.Kernel
    ) -> tuple[jax.Array, Cache | None]:
        """(attention's output, shaped as the query; the cache with the block's keys and values).

        A rank's query [B, T, N, H], key and value [B, T, K, H].
        """


@dataclasses.dataclass(frozen=True)
class FullSequence:
    """Positions 0..T-1. Nothing precedes them, so a cache is written and not read; without one nothing is written.

    row: the first one's place in the cache.
    """

    ends: jax.Array | None = None
    row: int = 0

    def indices(self, length):
        return jnp.arange(length)[None, :]

    def attend(self, query, key, value, *, cache, kernel):
        cache = cache and _write(cache, key, value, row=self.row, start=0, kernel=kernel)
        return kernels.causal(query, key, value, kernel=kernel), cache

    def halves(self, rows):
        first, second = (None, None) if self.ends is None else (self.ends[:rows], self.ends[rows:])
        return FullSequence(first, self.row), FullSequence(second, self.row + rows)

    def parts(self, at):
        return FirstPart(self), LaterPart(at, row=self.row)


FULL_SEQUENCE = FullSequence()


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of several documents, for training: each attends only to itself, and starts at position 0. No cache.

    segments: [B, T] integers; a document is a run of equal numbers, which may come again in a later one.
    begins: [B, T] int32, where in the row each position's document begins, which tells it from all others.
    """

    segments: jax.Array
    begins: jax.Array = dataclasses.field(init=False)
    ends: ClassVar[None] = None

    def __post_init__(self):
        index = jnp.broadcast_to(jnp.arange(self.segments.shape[1])[None, :], self.segments.shape)
        first = jnp.pad(self.segments[:, 1:] != self.segments[:, :-1], ((0, 0), (1, 0)))
        object.__setattr__(self, "begins", jax.lax.cummax(jnp.where(first, index, 0), axis=1))

    def indices(self, length):
        return jnp.arange(length)[None, :] - self.begins

    def attend(self, query, key, value, *, cache, kernel):
        return kernels.causal(query, key, value, kernel=kernel, segments=self.begins), cache

    def halves(self, rows):
        return Packed(self.segments[:rows]), Packed(self.segments[rows:])

    def parts(self, at):
        return FirstPart(Packed(self.segments[:, :at])), LaterPart(at, self.begins)


@dataclasses.dataclass(frozen=True)
class ChunkedPrefill:
    """Positions start..start+T-1 of every row; the cache holds those before, and must have room for these.

    start: an int32 scalar. row: the first one's place in the cache.
    """

    start: jax.Array
    row: int = 0
    ends: ClassVar[None] = None

    def indices(self, length):
        return self.start + jnp.arange(length)[None, :]

    def attend(self, query, key, value, *, cache, kernel):
        cache = _write(cache, key, value, row=self.row, start=self.start, kernel=kernel)
        own = (array[self.row : self.row + len(query)] for array in (cache.key, cache.value))
        return kernels.extend(query, *own, self.start, kernel=kernel), cache

    def halves(self, rows):
        return ChunkedPrefill(self.start, self.row), ChunkedPrefill(self.start, self.row + rows)

    def parts(self, at):
        return self, ChunkedPrefill(self.start + at, self.row)


class Left(NamedTuple):
    """A first part's keys and values, in the place of a cache where there is none: the later part reads them."""

    key: jax.Array
    value: jax.Array


@dataclasses.dataclass(frozen=True)
class FirstPart:
    """The first positions of rows, as `of` has them."""

    of: FullSequence | Packed
    ends: ClassVar[None] = None

    def indices(self, length):
        return self.of.indices(length)

    def attend(self, query, key, value, *, cache, kernel):
        attended, cache = self.of.attend(query, key, value, cache=cache, kernel=kernel)
        return attended, Left(key, value) if cache is None else cache


@dataclasses.dataclass(frozen=True)
class LaterPart:
    """The positions from `start` on of rows whose others are a `FirstPart`.

    begins: [B, T] of packed rows, as `Packed` has them. row: the first one's place in the cache. Without a cache the
    scores are whole in memory, [B, N, T - start, T]: no kernel here has a gradient for a mask that begins later.
    """

    start: int
    begins: jax.Array | None = None
    row: int = 0
    ends: ClassVar[None] = None

    def indices(self, length):
        index = self.start + jnp.arange(length)[None, :]
        return index if self.begins is None else index - self.begins[:, self.start :]

    def attend(self, query, key, value, *, cache, kernel):
        if not isinstance(cache, Left):
            chunk = ChunkedPrefill(jnp.int32(self.start), self.row)
            return chunk.attend(query, key, value, cache=cache, kernel=kernel)
        keys, values = (jnp.concatenate(pair, axis=1) for pair in ((cache.key, key), (cache.value, value)))
        index = jnp.arange(keys.shape[1])
        seen = (index[None, :] <= index[self.start :, None])[None]
        if self.begins is not None:
            seen = seen & (self.begins[:, self.start :, None] == self.begins[:, None, :])
        attended = jax.nn.dot_product_attention(query, keys, values, mask=seen[:, None], implementation="xla")
        return attended, None


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """One token a row (T is 1), at row b's position `lengths[b]`: [B] int32, how many positions the cache holds."""

    lengths: jax.Array
    ends: ClassVar[None] = None

    def indices(self, length):
        return self.lengths[:, None]

    def halves(self, rows):
        raise UserError("interleave=2 is for training and prefill: a decode step has too few tokens to halve")

    parts = halves

    def attend(self, query, key, value, *, cache, kernel):
        here = (slice(None),) * (kernel.cache_dims.index("S") - 1)  # a row's heads, where these come first
        # vmap, as XLA for GPUs aborts on the constants of an index of rows, among operations in program order.
        write = jax.vmap(lambda row, length, new: row.at[*here, length].set(new, unique_indices=True))
        cache = Cache(write(cache.key, self.lengths, key[:, 0]), write(cache.value, self.lengths, value[:, 0]))
        return kernels.decode(query, cache.key, cache.value, self.lengths + 1, kernel=kernel), cache


def _write(cache, key, value, *, row, start, kernel):
    place = tuple({"B": row, "S": start}.get(dim, 0) for dim in kernel.cache_dims)

    def write(into, block):
        return jax.lax.dynamic_update_slice(into, kernels.cached(block, kernel=kernel), place)

    return Cache(write(cache.key, key), write(cache.value, value))


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position, [H/2], in float64: rotary position embedding (arXiv 2104.09864)."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    plain = config.rope_theta**-exponents
    return plain if config.rope_scaling is None else _llama3(plain, config.rope_scaling)


def _llama3(plain, scaling):
    """Llama 3's stretch (arXiv 2407.21783): slow rotations by `factor`, fast ones not, a ramp between."""
    turns = scaling.original_context * plain / (2 * math.pi)
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling.factor


def rotary_tables(positions: jax.Array, *, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, T, H/2], float32, for `positions` [B, T]; made once for all layers."""
    frequencies = jnp.asarray(rotary_frequencies(config)[None, None, :], jnp.float32)
    angles = positions[:, :, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [B, T, heads, H] turned by its positions' angles: dimension i pairs with i + H/2."""
    cos, sin = (part[:, :, None, :] for part in table)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)
