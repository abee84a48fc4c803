"""Token embedding and output head, both split over the vocabulary: a rank holds V / ranks rows of each table."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ladder_jax.config import ModelConfig
from ladder_jax.nn import quantized
from ladder_jax.nn.parameter import Normal, Sizes, declare, sizes_of
from ladder_jax.parallel import all_reduce, rank
from ladder_jax.parallel.collectives import EMBEDDING

Reduce = Callable[[jax.Array, tuple[str, ...]], jax.Array]


class Embedding(nnx.Module):
    """A [V, D] table, used to look tokens up, to score them, or (tied) both.

    On one device `Embedding(config, rngs=nnx.Rngs(0))(tokens)` looks up, and its `logits(x)` scores.
    """

    def __init__(self, config: ModelConfig | Sizes, *, rngs: nnx.Rngs | None = None):
        sizes = sizes_of(config)
        self.vocab_size, self.dtype = sizes.config.vocab_size, sizes.config.dtype.value
        self.table = declare("VD", sizes=sizes, init=Normal(0.02), rngs=rngs)

    def __call__(self, tokens_BT: jax.Array, *, axes: tuple[str, ...] = ()) -> jax.Array:
        """`lookup` in the model's compute dtype."""
        return self.lookup(tokens_BT, axes=axes, dtype=jnp.dtype(self.dtype))

    @jax.named_scope(EMBEDDING)
    def lookup(
        self, tokens_BT: jax.Array, *, axes: tuple[str, ...], dtype: jnp.dtype, reduce: Reduce = all_reduce
    ) -> jax.Array:
        """Embeddings [B, T, D], equal on all ranks of `axes`: `reduce` adds what each rank's rows give."""
        table = self.table.get_value()
        local = tokens_BT - rank(axes) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = quantized.rows(table, jnp.clip(local, 0, table.shape[0] - 1), dtype=dtype)
        return reduce(jnp.where(mine[:, :, None], rows, 0), axes)

    def logits(self, x_BTD: jax.Array, *, axes: tuple[str, ...] = ()) -> jax.Array:
        """Float32 scores of this rank's share of the vocabulary, [B, T, V/ranks]; padding is -inf."""
        table = self.table.get_value()
        logits = quantized.einsum("BTD,VD->BTV", x_BTD, table, dtype=jnp.float32)
        token = rank(axes) * table.shape[0] + jnp.arange(table.shape[0])
        return jnp.where((token < self.vocab_size)[None, None, :], logits, -jnp.inf)
