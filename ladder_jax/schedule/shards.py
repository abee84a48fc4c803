"""Sizes of one device's shard of a model under tensor parallelism, from the configuration alone; imports no jax."""

import dataclasses

from ladder_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Shard:
    """One device's shard. A key/value head that several ranks share is replicated on them, and counts on each.

    queries: columns of the query projection. keys: columns of the key projection, and of the value projection.
    features: hidden features of the MLP. vocabulary: rows of the embedding table, including padding.
    """

    queries: int
    keys: int
    features: int
    vocabulary: int
    d_model: int

    @property
    def attention(self) -> int:
        """Matrix elements of an attention sublayer: query, key, value and output projections."""
        return self.d_model * (2 * self.queries + 2 * self.keys)

    @property
    def mlp(self) -> int:
        """Matrix elements of an MLP sublayer: gate, up and down."""
        return 3 * self.d_model * self.features


def shard(config: ModelConfig, *, ranks: int) -> Shard:
    """`ranks` must divide the model (see `config.check_fits_mesh`)."""
    return Shard(
        queries=config.num_heads // ranks * config.head_dim,
        keys=max(1, config.num_kv_heads // ranks) * config.head_dim,
        features=config.d_ff // ranks,
        vocabulary=-(-config.vocab_size // (128 * ranks)) * 128,
        d_model=config.d_model,
    )


def single_rank(config: ModelConfig, *, ranks: int) -> ModelConfig:
    """One rank's shard as a model for one device: the same matrices, cache and kernels, without communication.

    Its outputs mean nothing; its time is that of a rank without collectives. `ranks` must divide the model.
    """
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=max(1, config.num_kv_heads // ranks),
        d_ff=config.d_ff // ranks,
        vocab_size=shard(config, ranks=ranks).vocabulary,
    )
