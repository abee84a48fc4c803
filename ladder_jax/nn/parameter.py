"""A parameter is declared once; shapes, shardings, initial values and stored names all follow from
it.

Dimensions are single letters: V vocabulary, D model, N query heads, K key/value heads, H head size,
F feed-forward, L layers.
Of experts: E all of them, padded to a multiple of the ranks, C those a router chooses from, M the
width of one and W of the shared one.
Small letters are whole on every rank, and all tensor ranks compute the same with them.
Which mesh axis splits which letter is `parallel.Layout`'s business.
"""

import dataclasses
import functools
import math
import statistics
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax import Array
from jax.nn import initializers
from jax.sharding import PartitionSpec

from ladder_jax.config import ModelConfig
from ladder_jax.config.fields import check_type
from ladder_jax.errors import UserError
from ladder_jax.parallel import Layout
from ladder_jax.parallel.collectives import ROUTER, Axes
from ladder_jax.parallel.compiled import initializer_options
from ladder_jax.parallel.mesh import SHARDED, apart, tracing

DENSE, LAYERS = STACKS = ("dense", "layers")
"""The names under which stacks of layers with equal parameters are stored: the first is of
`moe.dense_layers`.
"""
Initializer = Callable[[Array, tuple[int, ...]], Array]  # (key, shape) -> float32 values
ones = functools.partial(initializers.ones, dtype=jnp.float32)
zeros = functools.partial(initializers.zeros, dtype=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Normal:
    """Normal values by looking 16 random bits up in a table of quantiles.

    No arithmetic, so nothing rounds differently where a mesh gives an array another shape or where
    another compiler vectorises: the values are bit-identical on every mesh and backend.
    """

    stddev: float

    def __call__(self, key: Array, shape: tuple[int, ...]) -> Array:
        table = jnp.asarray(self.stddev * _quantiles(), jnp.float32)
        bits = jax.random.bits(key, shape, jnp.uint16)
        return jnp.take(table, bits.astype(jnp.int32))


@functools.cache
def _quantiles():
    inverse = statistics.NormalDist().inv_cdf
    count = 2**16
    return np.array([inverse((index + 0.5) / count) for index in range(count)])


def stacks(config: ModelConfig) -> dict[str, range]:
    """Which layers of the model each stack holds."""
    dense = 0 if config.moe is None else config.moe.dense_layers
    return {**({DENSE: range(dense)} if dense else {}), LAYERS: range(dense, config.num_layers)}


def stack_of(config: ModelConfig, layer: int) -> tuple[str, int]:
    """The stack that holds the model's layer `layer`, and the layer's place in it."""
    for name, of in stacks(config).items():
        if layer in of:
            return name, layer - of.start
    raise IndexError(layer)


def residual_writer(config: ModelConfig) -> Normal:
    """For the matrices that write to the residual stream: smaller the more of them there are, as in
    the paper.
    """
    return Normal(0.02 / math.sqrt(2 * config.num_layers))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a module is declared with: the size of every named dimension of a model over `ranks`
    tensor-parallel ranks.

    layers: a module declared with these sizes stands for so many, its parameters led by L.
    rngs: of its initial values; None: it has shapes alone.
    """

    config: ModelConfig
    ranks: int = 1
    layers: int | None = None
    rngs: nnx.Rngs | None = None

    def __getitem__(self, dim: str) -> int:
        config = self.config
        sizes = {
            "V": padded_vocabulary(config.vocab_size, ranks=self.ranks),
            "D": config.d_model,
            "N": config.num_heads,
            "K": config.num_kv_heads,
            "H": config.head_dim,
            "F": config.d_ff,
            "L": self.layers,
        }
        if (moe := config.moe) is not None:
            sizes |= {
                "E": moe.padded(self.ranks),
                "C": moe.experts,
                "M": moe.expert_width,
                "W": moe.shared_width,
            }
        return sizes[dim]

    def stored(self, dims: str) -> str:
        """The dimensions of a parameter that is declared with `dims`."""
        return dims if self.layers is None else "L" + dims

    def declare(self, dims: str, *, init: Initializer = Normal(0.02)) -> "Parameter":
        """A float32 parameter, such as `sizes.declare("DNH")`.

        Its key is the next of the stream `rngs.params`. Without `rngs` it has only its shape (a
        jax.ShapeDtypeStruct): `initializer` fills in a whole model, by the parameters' names.
        """
        dims = self.stored(dims)
        shape = tuple(self[dim.upper()] for dim in dims)
        if self.rngs is None:
            return Parameter(jax.ShapeDtypeStruct(shape, jnp.float32), dims=dims, init=init)
        key = next_key(self.rngs)
        key = key if self.layers is None else _folded(key, jnp.arange(self.layers))
        value = _draw(init, key, dims=dims, shape=shape, config=self.config)
        return Parameter(value, dims=dims, init=init)


def padded_vocabulary(size: int, *, ranks: int) -> int:
    """The stored vocabulary: each rank's share is a multiple of 128, a TPU's lane width."""
    multiple = 128 * ranks
    return -(-size // multiple) * multiple


class Parameter(nnx.Param):
    """A Flax Param whose repr is its dimensions, dtype and shape, and no values."""

    def __repr__(self) -> str:
        arrays = [f"{array.dtype}{list(array.shape)}" for array in jax.tree.leaves(self)]
        return f"Parameter({self.dims}, {', '.join(arrays)})"


class Module(nnx.Module):
    """A Flax module whose repr lists its parameters, one a line, by the names that checkpoints
    store.
    """

    def __repr__(self) -> str:
        params = nnx.state(self)
        count = sum(array.size for array in jax.tree.leaves(params))
        lines = [
            f"{'.'.join(map(str, path))}: {param!r}" for path, param in nnx.to_flat_state(params)
        ]
        return "\n  ".join([f"{type(self).__name__} of {count:,} parameters", *lines])


def sizes_of(config: ModelConfig | Sizes, rngs: nnx.Rngs | None) -> Sizes:
    """What a module is declared with: a model's sizes on one rank, or the given ones."""
    check_type("config", config, ModelConfig, Sizes)
    return config if isinstance(config, Sizes) else Sizes(config, rngs=rngs)


def next_key(rngs: nnx.Rngs) -> Array:
    """The next key of the stream `params`, or the default one. Raises UserError where there is
    neither.
    """
    check_type("rngs", rngs, nnx.Rngs)
    try:
        return rngs.params()
    except AttributeError:
        raise UserError("rngs has no stream `params`: nnx.Rngs(seed) has every one") from None


def _draw(init, key, *, dims, shape, config):
    """Values of one array, with zeros in what pads vocabulary or experts. key: of a stack one for
    each layer.
    """
    first, *rest = shape
    if dims.startswith("L"):
        draw = functools.partial(_draw, init, dims=dims[1:], shape=rest, config=config)
        return jax.vmap(draw)(key[:first])
    real = real_size(dims, config)
    if real is None:
        return init(key, shape)
    return pad_end(init(key, (real, *rest)), axis=0, by=first - real)


_folded = jax.vmap(jax.random.fold_in, in_axes=(None, 0))  # one key and numbers [n] -> keys [n]


def pad_end(x: Array, *, axis: int, by: int) -> Array:
    """`x` with `by` zeros behind its last element along `axis`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, by)
    return jnp.pad(x, widths)


def real_size(dims: str, config: ModelConfig) -> int | None:
    """The first dimension's size of an array (of one layer) that is stored padded: tokens, or
    experts.
    """
    return (
        config.vocab_size
        if dims.startswith("V")
        else config.moe.experts
        if dims.startswith("E")
        else None
    )


def dims_of(module: nnx.Module) -> dict:
    """The nested dict of the parameters' dimensions, such as {"embedding": {"table": "VD"},
    ...}.
    """
    return nnx.to_pure_dict(nnx.state(module), lambda param: param.dims)


def partition_specs(module: nnx.Module, *, axes: Axes = ("tensor",)) -> nnx.State:
    """How `nnx.state(module)` is split over tensor-parallel ranks: `in_specs` for a `jax.shard_map`
    of your own.

    Heads, feed-forward and vocabulary are split over `axes`, the rest is whole on every rank. Where
    there are fewer key/value heads than ranks jax refuses it: `Transformer` knows how several ranks
    share a head.
    """

    def split(param):
        return PartitionSpec(*(axes if dim in SHARDED else None for dim in param.dims))

    return jax.tree.map(
        split, nnx.state(module), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )


def is_matrix(dims: str) -> bool:
    """Whether a parameter of these dimensions is multiplied with activations; norm gains and biases
    are not.
    """
    of_layer = dims.removeprefix("L")
    return len(of_layer) > 1 and of_layer.upper() not in ("NH", "KH")


def is_rounded(dims: str) -> bool:
    """Whether the model uses such a parameter in the compute dtype. Routers multiply in float32, as
    gains do; biases are added in it.
    """
    return is_matrix(dims) and dims.removeprefix("L") != ROUTER


def abstract(module: nnx.Module, *, layout: Layout) -> dict:
    """The parameters as ShapeDtypeStructs with their shardings, by their stored names."""

    def place(param):
        shape = param.get_raw_value()
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=layout.sharding(param.dims))

    return nnx.to_pure_dict(nnx.state(module), place)


def root_key(seed: int) -> Array:
    """The key from which all initial values of a run, or a request's noise, are folded, by the same
    generator on every backend. That of jax's setting may draw a row otherwise beside others.
    """
    return jax.random.key(seed, impl="threefry2x32")


def initializer(
    modules: dict[str, nnx.Module], *, layout: Layout, config: ModelConfig
) -> Callable[[Array], dict]:
    """A function of a key: initial parameters of the modules, by their names, made in place on
    their devices. It is compiled once for all keys.

    Each array's key is folded from the given one, its name and its layer: neither the mesh nor the
    storage of the layers changes a value. What pads the vocabulary or the experts is zero, and
    stays zero.
    """
    params = {
        (name, *path): param
        for name, module in modules.items()
        for path, param in nnx.to_flat_state(nnx.state(module))
    }
    names = ["/".join(path).encode() for path in params]

    def value(param, key, of_layers):
        key = of_layers if param.dims.startswith("L") else key
        shape = param.get_raw_value().shape
        return _draw(param.init, key, dims=param.dims, shape=shape, config=config)

    def make(data, impl):
        key = jax.random.wrap_key_data(data, impl=impl)
        # for all arrays at once: with a fold for each the program takes longer to compile
        keys = _folded(key, np.array([zlib.crc32(name) for name in names], np.uint32))
        of_layers = jax.vmap(_folded, in_axes=(0, None))(keys, jnp.arange(config.num_layers))
        values = map(value, params.values(), keys, of_layers)
        return traverse_util.unflatten_dict(dict(zip(params, values, strict=True)))

    of_modules = {name: abstract(module, layout=layout) for name, module in modules.items()}
    shardings = jax.tree.map(lambda a: a.sharding, of_modules)
    jitted = functools.partial(jax.jit, make, static_argnums=1, out_shardings=shardings)
    traced = jitted()
    compiled = apart(jitted(compiler_options=initializer_options(layout.mesh)))

    def initial(key):
        data = jax.random.key_data(key)
        impl = jax.random.key_impl(key)
        if tracing():  # where jax takes no options
            return traced(data, impl)
        # from the host, as the key may be on other devices than the model
        return compiled(np.asarray(data), impl)

    return initial
