"""Choosing the next token from logits that are split over the vocabulary. No rank gathers them.

Every setting is an array with an entry a row: one compiled program serves all settings, and the rows of a batch may
have different ones.
"""

import dataclasses
import enum
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ladder_jax.config import DecodeConfig
from ladder_jax.decode import logit_filters
from ladder_jax.decode.logit_filters import Filters
from ladder_jax.decode.request import Request
from ladder_jax.parallel import all_ranks, anywhere, rank
from ladder_jax.parallel.collectives import CHOICE, Axes

DIMS = "B"
"""The dimensions of every field of `Settings`: split as the rows are, the same on all tensor-parallel ranks."""

NO_NUMBER = -1
"""The token of a row whose logits are no numbers: their largest is NaN or infinite."""

LEAST = 1e-30
"""The lowest temperature by which logits are divided, so that the quotients stay finite. Lower temperatures draw the
same tokens: already here, two different logits are further apart than the noise reaches."""

Numbers = float | Sequence[float]  # for all rows, or one a row


class Choice(enum.Enum):
    """How a compiled program chooses tokens. Greedy rows should pay no collective and no branch for sampling."""

    GREEDY = "greedy"  # each row's largest logit, after the repetition penalty
    SAMPLED = "sampled"  # by each row's settings, with log-probabilities


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settings:
    """How each row is sampled; every field is [B].

    temperature: float32; 0 is greedy.
    top_k: int32; only the k most probable tokens. 0 is off.
    top_p: float32; only the most probable tokens that together reach p. 1 is off.
    min_p: float32; only tokens at least p times as probable as the most probable one. 0 is off.
    repetition_penalty: float32; above 1, tokens that the row holds already become less likely. 1 is off.
    keys: typed PRNG keys, from which each row's noise is drawn.
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
        """From Python values, for as many rows as `keys` [B] has."""
        row = lambda value, dtype: jnp.asarray(np.broadcast_to(np.asarray(value, dtype), keys.shape))
        return cls(
            temperature=row(temperature, np.float32),
            top_k=row(top_k, np.int32),
            top_p=row(top_p, np.float32),
            min_p=row(min_p, np.float32),
            repetition_penalty=row(repetition_penalty, np.float32),
            keys=keys,
        )

    @classmethod
    def like(cls, config: DecodeConfig | Request, *, keys: jax.Array) -> "Settings":
        """`config`'s settings for every row."""
        return cls.of(
            keys,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
        )


@dataclasses.dataclass(frozen=True)
class AnyRow:
    """Whether any row on any rank of the mesh is sampled, uses top-k, top-p, or any filter: scalars, for branches."""

    sampled: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    filtered: jax.Array

    @classmethod
    def of(cls, settings: Settings) -> "AnyRow":
        """One small collective where rows are split over the mesh, else none: call it once, before many `sample`s."""
        sampled = settings.temperature > 0
        top_k, top_p = sampled & (settings.top_k > 0), sampled & (settings.top_p < 1)
        return cls(*anywhere(sampled, top_k, top_p, top_k | top_p | sampled & (settings.min_p > 0)))


def greedy(logits_BV: jax.Array, *, settings: Settings, seen_BV: jax.Array | None, axes: Axes) -> jax.Array:
    """Each row's token of the largest logit after the penalty, [B] int32, or NO_NUMBER; equal on all ranks of `axes`.

    One collective. Arguments as in `sample`.
    """
    scores = _penalize(logits_BV, seen_BV, settings)
    tokens, [largest], _ = argmax_with(scores, [jnp.max(logits_BV, axis=-1)], axes=axes)
    return _checked(tokens, jnp.max(largest, axis=0))


def sample(
    logits_BV: jax.Array,
    *,
    settings: Settings,
    any_row: AnyRow,
    positions: jax.Array,
    seen_BV: jax.Array | None,
    vocab_size: int,
    axes: Axes,
) -> tuple[jax.Array, jax.Array]:
    """Each row's next token, [B] int32, and its log-probability, [B] float32; equal on all ranks of `axes`.

    In the order of Hugging Face's logits processors: repetition penalty, temperature, top-k, top-p, min-p, each applied
    to what the one before it left. Greedy rows take the largest logit after the penalty. The log-probability is the
    log-softmax of the logits as given, before any of these. NO_NUMBER, and NaN, where the logits are no numbers.
    One collective, and those of `logit_filters.filtered` where a row uses a filter.

    logits_BV: this rank's share [B, V/ranks], float32, -inf from token `vocab_size` on.
    positions: [B]. A row's noise depends on its key, its position and the token alone, so that neither
        the mesh nor the row's neighbours change its text.
    seen_BV: this rank's share [B, V/ranks], bool: the tokens to penalise; None for none.
    """
    scores, sampled = _penalize(logits_BV, seen_BV, settings), settings.temperature > 0

    # Branches rather than selects: without a sampled row no noise is drawn, without a filter no threshold is sought.
    def draw():
        # The padding stays -inf: divided by a large temperature it would be -inf x 0, which is NaN.
        drawn = scores / jnp.where(sampled, jnp.maximum(settings.temperature, LEAST), 1)[:, None]
        drawn = jnp.where(jnp.isneginf(scores), scores, drawn)
        filtered = functools.partial(logit_filters.filtered, filters=filters(settings, any_row), axes=axes)
        drawn = lax.cond(any_row.filtered, filtered, lambda x: x, drawn)
        noise = _noise(settings.keys, positions, size=scores.shape[-1], vocab_size=vocab_size, axes=axes)
        return jnp.where(sampled[:, None], drawn + noise, scores)

    chosen_by = lax.cond(any_row.sampled, draw, lambda: scores)
    largest = jnp.max(logits_BV, axis=-1)
    mass = jnp.sum(jnp.exp(logits_BV - jnp.where(jnp.isneginf(largest), 0, largest)[:, None]), axis=-1)
    own = jnp.take_along_axis(logits_BV, jnp.argmax(chosen_by, axis=-1)[:, None], axis=-1)[:, 0]
    tokens, [largest, mass, own], first = argmax_with(chosen_by, [largest, mass, own], axes=axes)
    whole = jnp.max(largest, axis=0)
    logprobs = _of_rank(own, first) - whole - jnp.log(jnp.sum(mass * jnp.exp(largest - whole[None]), axis=0))
    return _checked(tokens, whole), logprobs


def filters(settings: Settings, any_row: AnyRow) -> Filters:
    return Filters(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        any_top_k=any_row.top_k,
        any_top_p=any_row.top_p,
    )


def argmax(scores_BV: jax.Array, *, axes: Axes) -> jax.Array:
    """The first index of each row's largest score over all ranks, [B] int32. `scores_BV` is this rank's share."""
    return argmax_with(scores_BV, [], axes=axes)[0]


@jax.named_scope(CHOICE)
def argmax_with(
    scores_BV: jax.Array, extra: Sequence[jax.Array], *, axes: Axes
) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """`argmax`; every rank's `extra` values, [ranks, B] float32 for each [B] given; and the rank of each maximum, [B].

    One all-gather of integers carries all of it: with so few bytes its time is latency.
    """
    token = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32) + rank(axes) * scores_BV.shape[-1]
    sent = [token, *(lax.bitcast_convert_type(x, jnp.int32) for x in (jnp.max(scores_BV, axis=-1), *extra))]
    tokens, *rest = jnp.moveaxis(all_ranks(jnp.stack(sent), axes), 1, 0)
    best, *others = (lax.bitcast_convert_type(x, jnp.float32) for x in rest)
    first = jnp.argmax(best, axis=0)  # the first of equals, which has the lower tokens
    return _of_rank(tokens, first), others, first


def _of_rank(x_RB, rank_B):
    """For each row the entry of one rank, [B]."""
    return jnp.take_along_axis(x_RB, rank_B[None], axis=0)[0]


def _penalize(logits_BV, seen_BV, settings):
    if seen_BV is None:
        return logits_BV
    penalty = settings.repetition_penalty[:, None]
    return jnp.where(seen_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def _noise(keys, positions, *, size, vocab_size, axes):
    """Gumbel noise for this rank's share, [B, V/ranks].

    The argmax of scores plus it is a draw from their softmax (the Gumbel-max trick).
    """
    tokens = rank(axes) * size + jnp.arange(size)

    def row(key, position):
        # For the whole vocabulary, which is cheap beside the head: so the noise is the same on every mesh.
        whole = jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)
        return jnp.take(whole, jnp.clip(tokens, 0, vocab_size - 1))

    return jax.vmap(row)(keys, positions)


def _checked(tokens_B, largest_B):
    return jnp.where(jnp.isfinite(largest_B), tokens_B, NO_NUMBER)


def seen_of(tokens_BT: jax.Array, lengths_B: jax.Array, *, size: int, axes: Axes) -> jax.Array:
    """Which tokens each right-padded row [B, T] holds, this rank's share [B, V/ranks] bool; `size` is V/ranks."""
    rows, length = tokens_BT.shape
    local = tokens_BT - rank(axes) * size
    mine = (local >= 0) & (local < size) & (jnp.arange(length)[None] < lengths_B[:, None])
    nowhere = jnp.zeros((rows, size + 1), bool)  # the last column is for other ranks' tokens and padding
    return nowhere.at[jnp.arange(rows)[:, None], jnp.where(mine, local, size)].set(True)[:, :size]


def mark(seen_BV: jax.Array, tokens_B: jax.Array, *, axes: Axes) -> jax.Array:
    """This rank's share of `seen`, [B, V/ranks], with each row's next token [B] added."""
    size = seen_BV.shape[-1]
    return seen_BV | (tokens_B[:, None] == (rank(axes) * size + jnp.arange(size))[None])


def pick_last(x_BTD: jax.Array, lengths: jax.Array) -> jax.Array:
    """The stream at each row's last position, [B, 1, D]."""
    return jnp.take_along_axis(x_BTD, (lengths - 1)[:, None, None], axis=1)
