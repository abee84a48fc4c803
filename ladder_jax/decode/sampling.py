"""Choosing the next token from logits that are split over the vocabulary. No rank gathers them.

Every setting is an array with an entry a row: one compiled program serves all settings, and rows that
were asked for differently share a batch.
"""

import dataclasses
import enum
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ladder_jax.decode import candidates
from ladder_jax.decode.winner import of_rank, winner
from ladder_jax.parallel import anywhere, rank

DIMS = "B"
"""Of every field of `Settings`: split as the rows are, the same on all tensor-parallel ranks."""

NO_NUMBER = -1
"""The token of a row whose logits are no numbers: their largest is NaN or infinite."""

LEAST = 1e-30
"""The lowest temperature that a row is drawn at. What one below it would draw, it does, but that logits over it stay
finite: any two that differ at all are then too far apart for the noise."""

Numbers = float | Sequence[float]  # for all rows, or one a row


class Choice(enum.Enum):
    """What a program can choose tokens by: what nobody asks for should cost no collective, and no branch."""

    GREEDY = "greedy"  # the largest logit of every row, after the penalty
    SAMPLED = "sampled"  # as each row's settings say, with log-probabilities


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


@dataclasses.dataclass(frozen=True)
class Asked:
    """Whether any row asks for it, on any rank of the whole mesh: scalars."""

    warm: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    cut: jax.Array

    @classmethod
    def of(cls, settings: Settings) -> "Asked":
        """One small collective over the mesh's axes of rows, if there are any: call it once, before many `sample`s."""
        warm = settings.temperature > 0
        top_k, top_p = warm & (settings.top_k > 0), warm & (settings.top_p < 1)
        return cls(*anywhere(warm, top_k, top_p, top_k | top_p | warm & (settings.min_p > 0)))


def greedy(logits_BV: jax.Array, *, settings: Settings, seen_BV: jax.Array | None, axes: tuple[str, ...]) -> jax.Array:
    """The largest logit's token of each row after the penalty, [B] int32, equal on all ranks of `axes`; or NO_NUMBER.

    One collective. The rest as in `sample`.
    """
    scores = _penalize(logits_BV, seen_BV, settings)
    tokens, [largest], _ = winner(scores, [jnp.max(logits_BV, axis=-1)], axes=axes)
    return _checked(tokens, jnp.max(largest, axis=0))


def sample(
    logits_BV: jax.Array,
    *,
    settings: Settings,
    asked: Asked,
    positions: jax.Array,
    seen_BV: jax.Array | None,
    vocab_size: int,
    axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """The next token of each row, [B] int32, and its log-probability, [B] float32; equal on all ranks of `axes`.

    In the order of Hugging Face's logits processors: repetition penalty, temperature, top-k, top-p, min-p,
    each of what the one before it left. Greedy rows take the largest logit after the penalty.
    The log-probability is the log-softmax of the logits as given, before any of these. One collective, and those
    of `candidates.cut` where a row asks for a cut. NO_NUMBER, and NaN, where the logits are no numbers.

    logits_BV: this rank's share [B, V/ranks], float32, -inf from token `vocab_size` on.
    positions: [B]. A row's noise depends on its key, its position and the token alone, so that neither
        the mesh nor the row's neighbours change its text.
    seen_BV: this rank's share [B, V/ranks], bool: the tokens to penalise; None for none.
    """
    scores, warm = _penalize(logits_BV, seen_BV, settings), settings.temperature > 0

    # Branches, not choices of two results: greedy decoding draws no noise, and a cut that no row asks for is not made.
    def draw():
        # -inf, of the padding, stays it: over a large temperature it would be -inf x 0, which is no number.
        drawn = scores / jnp.where(warm, jnp.maximum(settings.temperature, LEAST), 1)[:, None]
        drawn = jnp.where(jnp.isneginf(scores), scores, drawn)
        cut = functools.partial(candidates.cut, settings=settings, asked=asked, axes=axes)
        drawn = lax.cond(asked.cut, cut, lambda x: x, drawn)
        noise = _noise(settings.keys, positions, size=scores.shape[-1], vocab_size=vocab_size, axes=axes)
        return jnp.where(warm[:, None], drawn + noise, scores)

    chosen_by = lax.cond(asked.warm, draw, lambda: scores)
    largest = jnp.max(logits_BV, axis=-1)
    mass = jnp.sum(jnp.exp(logits_BV - jnp.where(jnp.isneginf(largest), 0, largest)[:, None]), axis=-1)
    own = jnp.take_along_axis(logits_BV, jnp.argmax(chosen_by, axis=-1)[:, None], axis=-1)[:, 0]
    tokens, [largest, mass, own], first = winner(chosen_by, [largest, mass, own], axes=axes)
    whole = jnp.max(largest, axis=0)
    logprobs = of_rank(own, first) - whole - jnp.log(jnp.sum(mass * jnp.exp(largest - whole[None]), axis=0))
    return _checked(tokens, whole), logprobs


def _penalize(logits_BV: jax.Array, seen_BV: jax.Array | None, settings: Settings) -> jax.Array:
    if seen_BV is None:
        return logits_BV
    penalty = settings.repetition_penalty[:, None]
    return jnp.where(seen_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


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


def _checked(tokens_B: jax.Array, largest_B: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(largest_B), tokens_B, NO_NUMBER)


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
