"""Token embedding and output head, both split over the vocabulary, and the cross-entropy that fits them.

A rank holds V / ranks rows of each table. No rank ever holds all logits of a training step.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ladder_jax.nn import quantized
from ladder_jax.nn.parameter import Normal, Sizes, declare
from ladder_jax.parallel import all_max, all_reduce, rank
from ladder_jax.parallel.collectives import EMBEDDING, LOSS

Reduce = Callable[[jax.Array, tuple[str, ...]], jax.Array]


class Embedding(nnx.Module):
    """A [V, D] table, used to look tokens up, to score them, or (tied) both."""

    def __init__(self, sizes: Sizes):
        self.vocab_size = sizes.config.vocab_size
        self.table = declare("VD", sizes=sizes, init=Normal(0.02))

    @jax.named_scope(EMBEDDING)
    def lookup(
        self, tokens_BT: jax.Array, *, axes: tuple[str, ...], dtype: jnp.dtype, reduce: Reduce = all_reduce
    ) -> jax.Array:
        """Embeddings [B, T, D], equal on all ranks: each adds the rows that it holds. Or as `reduce` has them."""
        table = self.table.get_value()
        local = tokens_BT - rank(axes) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = quantized.rows(table, jnp.clip(local, 0, table.shape[0] - 1), dtype=dtype)
        return reduce(jnp.where(mine[:, :, None], rows, 0), axes)

    def logits(self, x_BTD: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
        """Float32 scores of this rank's share of the vocabulary, [B, T, V/ranks]; padding is -inf."""
        table = self.table.get_value()
        logits = quantized.einsum("BTD,VD->BTV", x_BTD, table, dtype=jnp.float32)
        token = rank(axes) * table.shape[0] + jnp.arange(table.shape[0])
        return jnp.where((token < self.vocab_size)[None, None, :], logits, -jnp.inf)


@jax.named_scope(LOSS)
def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """Negative log-likelihood of each target in nats, [B, T] float32, equal on all ranks of `axes`.

    `logits_BTV` is this rank's share [B, T, V/ranks]; three small all-reduces of [B, T] join them.
    """
    size = logits_BTV.shape[-1]
    largest = all_max(lax.stop_gradient(jnp.max(logits_BTV, axis=-1)), axes)
    total = all_reduce(jnp.sum(jnp.exp(logits_BTV - largest[:, :, None]), axis=-1), axes)
    local = targets_BT - rank(axes) * size
    mine = (local >= 0) & (local < size)
    picked = jnp.take_along_axis(logits_BTV, jnp.clip(local, 0, size - 1)[:, :, None], axis=-1)[:, :, 0]
    target = all_reduce(jnp.where(mine, picked, 0.0), axes)
    return jnp.log(total) + largest - target
