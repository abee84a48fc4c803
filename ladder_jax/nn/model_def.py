"""A model without its parameters' values: its configuration, its layout on a mesh, and its modules'
shapes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.sharding import Mesh
from jax.typing import ArrayLike

from ladder_jax import residual
from ladder_jax.config import (
    CollectiveMatmul,
    Execution,
    ExpertParallelism,
    ModelConfig,
    Phase,
    check_exchange,
    check_execution,
)
from ladder_jax.config.fields import check, check_type, member
from ladder_jax.errors import UserError, unknown
from ladder_jax.nn import attention, parameter
from ladder_jax.nn.attention import Cache, Kernel
from ladder_jax.nn.modules import Embedding, Layer, RMSNorm, normalise, recomputed
from ladder_jax.nn.parameter import DENSE, stacks
from ladder_jax.parallel import Layout, NamedMesh, Overlap, Split, Traits, cache_programs, layout
from ladder_jax.residual.wires.sequence import SequenceParallel

Params = dict[str, Any]  # nested dict of arrays, by the names that checkpoints store


@dataclasses.dataclass(frozen=True)
class ModelDef:
    """Everything about a model but its parameters' values: hashable, so that compiled functions are
    cached by it.

    experts: how a program with sequence parallelism reaches experts; others, as decoding, reduce
        their sums.
    sections: of the configuration, those that this class computes.
    """

    sections: ClassVar[tuple[str, ...]] = ("rope_scaling", "moe")

    config: ModelConfig
    layout: Layout
    experts: ExpertParallelism = ExpertParallelism.REDUCE

    def __post_init__(self):
        for name, section in vars(self.config).items():
            known = name in self.sections or not dataclasses.is_dataclass(section)
            check(
                known,
                f"model.{name} is no part of a {type(self).__name__}: ladder_jax.{name} defines such models",
            )
        if self.experts is ExpertParallelism.EXCHANGE:
            check_exchange(self.config.moe, residual=self.config.residual, sequence_parallel=True)

    @functools.cached_property
    def topology(self) -> residual.Topology:
        return residual.of_model(self.config)

    @property
    def dtype(self) -> jnp.dtype:
        """Of matmuls and of the sublayers' all-reduces."""
        return jnp.dtype(self.config.dtype.value)

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The attention kernel for this mesh's devices, which also decides the order of a cache's
        dimensions.
        """
        return attention.choose(self.config, mesh=self.layout.mesh)

    def splits(self, execution: Execution) -> bool:
        """Whether the stream is split along the sequence over the tensor ranks."""
        return execution.sequence_parallel and self.layout.ranks > 1 and not self.layout.emulated

    def exchanges(self, execution: Execution) -> bool:
        """Whether the ranks exchange the rows of experts."""
        return self.splits(execution) and self.experts is ExpertParallelism.EXCHANGE

    def check(self, execution: Execution, *, rows: int) -> None:
        """Raises UserError for an execution that is none of this model's, on a rank of `rows`
        rows.
        """
        check_execution(execution, model=self.config, rows=rows, splits=self.splits(execution))

    def wire(self, execution: Execution) -> residual.AllReduce:
        """How sublayers' outputs cross the ranks: on a rank, inside a shard_map."""
        axes = self.layout.tensor
        if not self.splits(execution):
            return self.topology.wire(axes, launch=execution.launch)

        @recomputed
        def normalised(x):
            return normalise(x, eps=self.config.norm_eps).astype(self.dtype)

        if not self.exchanges(execution):
            rings = execution.collective_matmul is CollectiveMatmul.RING
            return SequenceParallel(axes, normalised, rings)
        from ladder_jax.residual.wires.exchange import Exchange

        return Exchange(axes, normalised, moe=self.config.moe)

    def traits(self, execution: Execution, *, phase: Phase) -> Traits:
        """The traits of a program of this model, by which compiler options are chosen."""
        is_split = {
            Split.WEIGHTS: self.layout.fsdp > 1,
            Split.SEQUENCE: execution.sequence_parallel and self.layout.ranks > 1,
            Split.EXPERTS: self.config.moe is not None,
            Split.ROWS: self.exchanges(execution),
        }
        split = frozenset(what for what, yes in is_split.items() if yes)
        overlap = Overlap.HIDES if execution.interleave == 2 else self.topology.overlap
        return Traits(
            overlap, phase, execution.loop, split, execution.collective_matmul, execution.launch
        )

    @functools.cached_property
    def dims(self) -> Params:
        """The dimensions of every parameter, such as {"embedding": {"table": "VD"}, ...}."""
        return {name: parameter.dims_of(module) for name, module in self.modules.items()}

    @functools.cached_property
    def abstract(self) -> Params:
        """Shape, dtype and sharding of every parameter (jax.ShapeDtypeStruct)."""
        return {name: parameter.abstract(m, layout=self.layout) for name, m in self.modules.items()}

    @functools.cached_property
    def pieces(self) -> dict[str, jax.ShapeDtypeStruct]:
        """As `abstract`, by each parameter's path, such as "layers/mlp/up"; of stacks, of one
        layer.
        """
        found = traverse_util.flatten_dict(self.abstract, sep="/")
        for name, dims in traverse_util.flatten_dict(self.dims, sep="/").items():
            if dims.startswith("L"):
                sharding = self.layout.sharding(dims[1:])
                found[name] = found[name].update(shape=found[name].shape[1:], sharding=sharding)
        return found

    @functools.cached_property
    def modules(self) -> dict[str, nnx.Module]:
        return self.declare()

    def declare(self) -> dict[str, nnx.Module]:
        """The model's modules, their parameters declared and without values."""
        return declare(self.config, ranks=self.layout.ranks)

    def cache(self, array: Callable[[ModelConfig, Kernel, str], Any]) -> Any:
        """One layer's cache, each array by its model, its kernel and its dimensions in the kernel's
        order.
        """
        one = functools.partial(array, self.config, self.kernel, self.kernel.cache_dims)
        return Cache(one(), one())

    @functools.cached_property
    def _graphs(self):
        return {name: nnx.split(module)[0] for name, module in self.modules.items()}

    def bind(self, name: str, params: Params) -> Any:
        """The module called `name` over a rank's arrays; one of STACKS gives one layer. Only while
        tracing.
        """
        return nnx.merge(self._graphs[name], params)


def define(
    config: ModelConfig,
    *,
    mesh: Mesh | NamedMesh,
    experts: ExpertParallelism | str = ExpertParallelism.REDUCE,
) -> ModelDef:
    form = member(ExpertParallelism, "experts", experts)
    return ModelDef(config, layout(config, mesh=mesh), form)


def declare(config: ModelConfig, *, ranks: int) -> dict[str, nnx.Module]:
    """The model's modules, their parameters declared and without values."""
    sizes = parameter.Sizes(config, ranks)
    layers = {}
    for name, of in stacks(config).items():
        own = _without_experts(config) if name == DENSE else config
        layers[name] = Layer(parameter.Sizes(own, ranks, layers=len(of)))
    modules = {"embedding": Embedding(sizes), **layers, "final_norm": RMSNorm(sizes)}
    return modules if config.tie_embeddings else {**modules, "head": Embedding(sizes)}


def _without_experts(config):
    """Of a layer without experts in a model with them; `farskip` is a residual of experts only."""
    return dataclasses.replace(
        config, moe=None, residual="ladder" if config.residual == "farskip" else config.residual
    )


def initialize(definition: ModelDef, *, seed: int = 0, key: jax.Array | None = None) -> Params:
    """Initial parameters by a seed, or by a key in its place; the same for every mesh and loop
    form.
    """
    key = parameter.root_key(seed) if key is None else key
    return _initializer(definition)(key)


@cache_programs
def _initializer(definition):
    return parameter.initializer(
        definition.modules, layout=definition.layout, config=definition.config
    )


def matrix_elements(definition: ModelDef) -> int:
    """Elements of all matrices that multiply a token's activations: the head counts; the
    embedding's lookup, the rows that pad the vocabulary, and the experts that a token does not
    choose do not.
    """
    config = definition.config

    total = config.vocab_size * config.d_model
    arrays = jax.tree.leaves(definition.abstract)
    for leaf, dims in zip(arrays, jax.tree.leaves(definition.dims), strict=True):
        if dims.startswith("V") or not parameter.is_matrix(dims):
            continue
        if "E" in dims:
            total += leaf.size // leaf.shape[dims.index("E")] * config.moe.top_k
        else:
            total += leaf.size
    return total


def check_params(params: Any, *, expected: Mapping[str, Any], path: str = "params") -> None:
    """Raises UserError, naming the parameter, where names or shapes are not those of `expected`, a
    nested dict.
    """
    if not isinstance(params, Mapping):
        raise UserError(
            f"{path} must be a dict with {', '.join(expected)}, not a {type(params).__name__}"
        )
    for name in params:
        if name not in expected:
            raise unknown("parameter", f"{path}.{name}", [f"{path}.{one}" for one in expected])
    for name, wanted in expected.items():
        where = f"{path}.{name}"
        if name not in params:
            raise UserError(f"{where} is missing: this model has {', '.join(expected)}")
        if isinstance(wanted, Mapping):
            check_params(params[name], expected=wanted, path=where)
        elif (shape := getattr(params[name], "shape", None)) != wanted.shape:
            raise UserError(f"{where} has the shape {shape}, and this model needs {wanted.shape}")


def check_model(definition: Any, params: Any) -> None:
    """Raises UserError for what is no ModelDef, or neither its parameters nor a function that reads
    them.
    """
    check_type("definition", definition, ModelDef)
    if not callable(params):
        check_params(params, expected=definition.abstract)


def checked_tokens(
    tokens: ArrayLike, *, batch_ranks: int, vocab_size: int
) -> jax.Array | np.ndarray:
    """`tokens` [B, T] as int32; raises UserError for another shape or type, and for ids outside the
    vocabulary.

    Ids are checked on the host, or in an array of this process, for which the check waits; traced
    tokens have no values yet and are not checked.
    """
    if not isinstance(tokens, jax.Array):
        try:
            tokens = np.asarray(tokens)
        except ValueError:
            raise UserError("tokens must be [B, T]: these rows have different lengths") from None
    if tokens.ndim != 2 or tokens.shape[0] % batch_ranks:
        raise UserError(
            f"tokens must be [B, T] with B divisible by {batch_ranks}, not {tokens.shape}"
        )
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UserError(f"tokens must be integers, not {tokens.dtype}")
    if (
        tokens.size
        and not isinstance(tokens, jax.core.Tracer)
        and getattr(tokens, "is_fully_addressable", True)
    ):
        ids = np.asarray(tokens)
        for extreme in (ids.min(), ids.max()):
            if not 0 <= extreme < vocab_size:
                raise UserError(
                    f"token {extreme} is not in the vocabulary of {vocab_size} (0 to {vocab_size - 1})"
                )
    return tokens if tokens.dtype == jnp.int32 else tokens.astype(jnp.int32)
