"""Choosing the next token from logits that are split over the vocabulary. No rank gathers them.

Every setting is an array with an entry a row: one compiled program serves all settings, and rows that
were asked for differently share a batch.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ladder_jax import nn
from ladder_jax.decode import cuts
from ladder_jax.parallel import all_max, rank, ranks, varying

DIMS = "B"
"""Of every field of `Settings`: split as the rows are, the same on all tensor-parallel ranks."""

Numbers = float | Sequence[float]  # for all rows, or one a row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settings:
    """How each row is sampled; every field is [B].

    temperature: float32; 0 is greedy.
    top_k: int32; only the k most probable tokens. 0 is off.
    top_p: float32; only the most probable tokens that together reach p. 1 is off.
    min_p: float32; only tokens at least p times as probable as the most probable one. 0 is off.
    repetition_penalty: float32; how much less likely what was seen before becomes. 1 is off.
    keys: typed PRNG keys; a row's noise is its key's.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    keys: jax.Array

    @classmethod
    def of(
        cls,
        keys: jax.Array,
        *,
        temperature: Numbers = 0.0,
        top_k: Numbers = 0,
        top_p: Numbers = 1.0,
        min_p: Numbers = 0.0,
        repetition_penalty: Numbers = 1.0,
    ) -> "Settings":
        """From Python values. `keys`, [B] and typed, say how many rows there are."""
        row = lambda value, dtype: jnp.asarray(np.broadcast_to(np.asarray(value, dtype), keys.shape))
        return cls(
            temperature=row(temperature, np.float32),
            top_k=row(top_k, np.int32),
            top_p=row(top_p, np.float32),
            min_p=row(min_p, np.float32),
            repetition_penalty=row(repetition_penalty, np.float32),
            keys=keys,
        )


def sample(
    logits_BV: jax.Array,
    *,
    settings: Settings,
    positions: jax.Array,
    seen_BV: jax.Array | None,
    vocab_size: int,
    axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """The next token of each row, [B] int32, and its log-probability, [B] float32; equal on all ranks of `axes`.

    In the order of Hugging Face's logits processors: repetition penalty, temperature, top-k, top-p, min-p,
    each of what the one before it left. Greedy rows take the largest logit after the penalty.
    The log-probability is the log-softmax of the logits as given, before any of these.

    logits_BV: this rank's share [B, V/ranks], float32, -inf from token `vocab_size` on.
    positions: [B]. A row's noise depends on its key, its position and the token alone, so that neither
        the mesh nor the row's neighbours change its text.
    seen_BV: this rank's share [B, V/ranks], bool: the tokens to penalise; None for none.
    """
    scores = logits_BV if seen_BV is None else _penalize(logits_BV, seen_BV, settings.repetition_penalty)
    warm = settings.temperature > 0
    any_warm, any_top_k, any_top_p, any_min_p = _anywhere(
        warm, warm & (settings.top_k > 0), warm & (settings.top_p < 1), warm & (settings.min_p > 0)
    )

    # Branches, not choices of two results: greedy decoding draws no noise, and a cut that no row asks for is not made.
    def draw():
        # -inf, of the padding, stays it: over a large temperature it would be -inf x 0, which is no number.
        drawn = scores / jnp.where(warm, settings.temperature, 1)[:, None]
        drawn = jnp.where(jnp.isneginf(scores), scores, drawn)
        drawn = lax.cond(any_top_k, lambda x: cuts.top_k(x, settings.top_k, axes=axes), lambda x: x, drawn)
        drawn = lax.cond(any_top_p, lambda x: cuts.top_p(x, settings.top_p, axes=axes), lambda x: x, drawn)
        drawn = lax.cond(any_min_p, lambda x: cuts.min_p(x, settings.min_p, axes=axes), lambda x: x, drawn)
        noise = _noise(settings.keys, positions, size=scores.shape[-1], vocab_size=vocab_size, axes=axes)
        return jnp.where(warm[:, None], drawn + noise, scores)

    tokens = argmax(lax.cond(any_warm, draw, lambda: scores), axes=axes)
    return tokens, -nn.cross_entropy(logits_BV[:, None], tokens[:, None], axes=axes)[:, 0]


def _penalize(logits_BV: jax.Array, seen_BV: jax.Array, penalty_B: jax.Array) -> jax.Array:
    penalty = penalty_B[:, None]
    return jnp.where(seen_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def _anywhere(*asked: jax.Array) -> jax.Array:
    """For each [B] bool whether a row asks for it, on any rank of the whole mesh.

    There are collectives in the branches that this chooses: ranks that disagreed would wait for each
    other. Tensor-parallel ranks hold the same rows; those of other axes are asked, in one all-reduce.
    """
    flags = jnp.any(jnp.stack(asked), axis=-1)
    others = tuple(axis for axis in sorted(varying(flags)) if ranks((axis,)) > 1)
    return all_max(flags.astype(jnp.int32), others) > 0 if others else flags


def _noise(keys: jax.Array, positions: jax.Array, *, size: int, vocab_size: int, axes: tuple[str, ...]) -> jax.Array:
    """Gumbel noise for this rank's share, [B, V/ranks].

    The argmax of scores plus it is a draw from their softmax (the Gumbel-max trick).
    """
    tokens = rank(axes) * size + jnp.arange(size)

    def row(key, position):
        # Drawn for the whole vocabulary: cheap beside the head, and the same on every mesh.
        whole = jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)
        return jnp.take(whole, jnp.clip(tokens, 0, vocab_size - 1))

    return jax.vmap(row)(keys, positions)


def argmax(scores_BV: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """The first index of each row's largest score over all ranks, [B] int32."""
    best = jnp.max(scores_BV, axis=-1)
    token = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32) + rank(axes) * scores_BV.shape[-1]
    nobody = jnp.iinfo(jnp.int32).max
    return -all_max(-jnp.where(best == all_max(best, axes), token, nobody), axes)


def seen_of(tokens_BT: jax.Array, lengths_B: jax.Array, *, size: int, axes: tuple[str, ...]) -> jax.Array:
    """Which tokens stand in each right-padded row, this rank's share [B, V/ranks] bool; `size` is V/ranks."""
    rows, length = tokens_BT.shape
    local = tokens_BT - rank(axes) * size
    mine = (local >= 0) & (local < size) & (jnp.arange(length)[None] < lengths_B[:, None])
    nowhere = jnp.zeros((rows, size + 1), bool)  # the last column takes what is another rank's, and the padding
    return nowhere.at[jnp.arange(rows)[:, None], jnp.where(mine, local, size)].set(True)[:, :size]


def mark(seen_BV: jax.Array, tokens_B: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """`seen` [B, V/ranks], this rank's share, with each row's next token."""
    size = seen_BV.shape[-1]
    return seen_BV | (tokens_B[:, None] == (rank(axes) * size + jnp.arange(size))[None])


def pick_last(x_BTD: jax.Array, lengths: jax.Array) -> jax.Array:
    """The stream at each row's last position, [B, 1, D]."""
    return jnp.take_along_axis(x_BTD, (lengths - 1)[:, None, None], axis=1)
