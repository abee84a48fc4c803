"""Choosing the next token from logits that are split over the vocabulary. No rank gathers them."""

import jax
import jax.numpy as jnp

from ladder_jax.parallel import all_max, rank


def sample(
    logits_BV: jax.Array,
    *,
    temperature: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    vocab_size: int,
    axes: tuple[str, ...],
) -> jax.Array:
    """The next token of each row, [B] int32, equal on all ranks of `axes`.

    logits_BV: this rank's share [B, V/ranks], float32.
    temperature: a scalar; 0 is greedy. Otherwise the Gumbel-max trick: argmax of logits / temperature
        plus noise has the softmax's distribution.
    keys [B], positions [B]: a row's noise depends on them and on the token alone, so that neither
        the mesh nor the row's neighbours change its text.
    """
    size = logits_BV.shape[-1]
    start = rank(axes) * size

    def noise(key, position):
        # Drawn for the whole vocabulary: cheap beside the head, and the same on every mesh.
        whole = jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)
        return jnp.take(whole, jnp.clip(start + jnp.arange(size), 0, vocab_size - 1))

    def warm():
        return logits_BV / temperature + jax.vmap(noise)(keys, positions)

    # A branch, not a choice of two results: greedy decoding draws no noise.
    return argmax(jax.lax.cond(temperature > 0, warm, lambda: logits_BV), axes=axes)


def argmax(scores_BV: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """The first index of each row's largest score over all ranks, [B] int32."""
    best = jnp.max(scores_BV, axis=-1)
    token = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32) + rank(axes) * scores_BV.shape[-1]
    nobody = jnp.iinfo(jnp.int32).max
    return -all_max(-jnp.where(best == all_max(best, axes), token, nobody), axes)


def pick_last(x_BTD: jax.Array, lengths: jax.Array) -> jax.Array:
    """The stream at each row's last position, [B, 1, D]."""
    return jnp.take_along_axis(x_BTD, (lengths - 1)[:, None, None], axis=1)
