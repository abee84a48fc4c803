"""What one device of a tensor-parallel mesh holds of a model, counted from the configuration alone; imports no jax."""

import dataclasses

from ladder_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Shard:
    """queries, keys: columns of the query and of the key (or value) projection on the device; features: of the MLP.

    A key/value head that several ranks share is held by each of them. vocabulary: rows of the table, padding included.
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


def alone(config: ModelConfig, *, ranks: int) -> ModelConfig:
    """One rank's shard as a model of its own: the same matrices, cache and kernels, and nobody to communicate with.

    What it computes means nothing; it takes what the rank takes, but for the wire. `ranks` must divide the model.
    """
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=max(1, config.num_kv_heads // ranks),
        d_ff=config.d_ff // ranks,
        vocab_size=shard(config, ranks=ranks).vocabulary,
    )
