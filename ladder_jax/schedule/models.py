"""A model as the verbs ask for it, without weights: its configuration, by a name, and the sizes of
one device's shard under tensor parallelism. Only a name that needs `pretrained` imports jax.
"""

import dataclasses

from ladder_jax.config import PRESETS, ModelConfig, is_file, load, parse_residual, preset
from ladder_jax.errors import UserError, unknown
from ladder_jax.files import local_path


def by_name(name: str) -> ModelConfig:
    """A preset's, a configuration file's, or that of a model in any format: see
    `pretrained.model_config`.

    Imports jax only for the last. Raises UserError for an unknown name, and for a model with a side
    network, whose matrices the verbs' formulas do not have.
    """
    config = _by_name(name)
    if config.side is not None:
        raise UserError("a side network (model.side) is not counted here")
    return config


def _by_name(name: str) -> ModelConfig:
    if name in PRESETS:
        return preset(name)
    path = local_path(name)
    if is_file(path):
        return load(name).model
    if "/" not in name and not path.exists():
        also = "a configuration file, a run's or a Hugging Face folder, a GGUF file, or org/name of the Hub"
        raise UserError(f"{unknown('preset', name, PRESETS)}, nor is there {also} of that name")
    from ladder_jax.pretrained import model_config

    return model_config(name)


def variant(
    config: ModelConfig,
    residual: str,
    *,
    ranks: int | None,
    layers: int | None = None,
    ladder_layers: str | None = None,
    capacity: float | None = None,
) -> ModelConfig:
    """`config` with another residual over `ranks` devices; layers, capacity: None leaves its own."""
    moe = config.moe
    return dataclasses.replace(
        config,
        num_layers=layers or config.num_layers,
        residual=residual,
        ladder_layers=ladder_layers,
        ranks=ranks if parse_residual(residual).depends_on_ranks else None,
        moe=moe if capacity is None else dataclasses.replace(moe, capacity=capacity),
    )


@dataclasses.dataclass(frozen=True)
class Shard:
    """One device's shard. A key/value head that several ranks share is replicated on them, and
    counts on each.

    queries: columns of the query projection. keys: columns of the key projection, and of the value
    projection. vocabulary: rows of the embedding table, including padding.
    attention: matrix elements of an attention sublayer: query, key, value and output projections.
    mlp: those of an MLP sublayer, gate, up and down; of all the device's experts and of the shared
    one, and of the router, which is on every device. active_mlp: those of them that multiply a
    token, in the mean over the devices.
    """

    queries: int
    keys: int
    vocabulary: int
    attention: int
    mlp: int
    active_mlp: float


def shard(config: ModelConfig, *, ranks: int) -> Shard:
    """`ranks` must divide the model (see `config.check_fits_mesh`)."""
    moe = config.moe
    d_model = config.d_model
    queries = config.num_heads // ranks * config.head_dim
    keys = max(1, config.num_kv_heads // ranks) * config.head_dim
    if moe is None:
        features = active = config.d_ff // ranks
        router = 0
    else:
        shared = moe.shared_width // ranks
        features = moe.padded(ranks) // ranks * moe.expert_width + shared
        active = moe.top_k * moe.expert_width / ranks + shared
        router = d_model * moe.experts
    return Shard(
        queries,
        keys,
        vocabulary=-(-config.vocab_size // (128 * ranks)) * 128,
        attention=2 * d_model * (queries + keys),
        mlp=3 * d_model * features + router,
        active_mlp=3 * d_model * active + router,
    )


def kinds(config: ModelConfig) -> tuple[tuple[int, ModelConfig], ...]:
    """Of each kind of layers, how many there are, and a configuration all of whose layers have such
    matrices.

    Two kinds, if the first layers have no experts (`moe.dense_layers`): those, of no topology, and
    the others.
    """
    dense = 0 if config.moe is None else config.moe.dense_layers
    if not dense:
        return ((config.num_layers, config),)
    first = dataclasses.replace(
        config, moe=None, residual="standard", ladder_layers=None, ranks=None
    )
    others = dataclasses.replace(config, moe=dataclasses.replace(config.moe, dense_layers=0))
    return ((dense, first), (config.num_layers - dense, others))


def _shards(config: ModelConfig, ranks: int) -> list[tuple[int, Shard]]:
    """Of each kind of layers, how many there are, and a device's shard."""
    return [(count, shard(kind, ranks=ranks)) for count, kind in kinds(config)]


def layers(config: ModelConfig, *, ranks: int) -> int:
    """Matrix elements of all layers on a device."""
    return sum(count * (one.attention + one.mlp) for count, one in _shards(config, ranks))


def active_layers(config: ModelConfig, *, ranks: int) -> float:
    """Those of them that multiply a token."""
    return sum(count * (one.attention + one.active_mlp) for count, one in _shards(config, ranks))


def largest_layer(config: ModelConfig, *, ranks: int) -> int:
    """Matrix elements of that layer on a device."""
    return max(one.attention + one.mlp for _, one in _shards(config, ranks))


def parameters(config: ModelConfig) -> dict[str, int]:
    """Elements of a model's matrices and tables, as JSON; active: all but the experts that a token
    does not choose.
    """
    tables = config.vocab_size * config.d_model * (1 if config.tie_embeddings else 2)
    return {
        "parameters": layers(config, ranks=1) + tables,
        "parameters_active": round(active_layers(config, ranks=1)) + tables,
    }
