"""The Transformer: a forward pass on one rank, in parts, and the Flax module, compiled for its
mesh.

The parts: embedding, layers (all, or one range after another), final norm, scores.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from ladder_jax.config import SCANNED, Execution, Loop, ModelConfig, Phase
from ladder_jax.config.fields import check
from ladder_jax.errors import UserError
from ladder_jax.nn import loss
from ladder_jax.nn.attention import FULL_SEQUENCE, Positions
from ladder_jax.nn.model_def import (
    ModelDef,
    Params,
    check_params,
    checked_tokens,
    define,
    initialize,
    matrix_elements,
)
from ladder_jax.nn.modules import LayerContext
from ladder_jax.nn.parameter import Module, next_key, stacks
from ladder_jax.parallel import (
    Compiled,
    NamedMesh,
    all_reduce,
    cache_programs,
    context_mesh,
    make_mesh,
    mesh_of,
    on_own_mesh,
    over_mesh,
    over_ranks,
    pvary,
    with_ranks,
)
from ladder_jax.parallel.collectives import all_but_gathered, dims_in_turn, unshard
from ladder_jax.parallel.compiled import as_stored
from ladder_jax.residual import AllReduce, State, Step, Topology
from ladder_jax.residual.interleave import Interleaved
from ladder_jax.residual.loop import joined, layer_of, run_layers
from ladder_jax.residual.wires import sequence
from ladder_jax.scopes import HEAD

TILE = 128  # of positions, for which matmuls and attention kernels are best


class ForwardPass:
    """One forward pass on one rank, over tokens of `shape` [B, T]: all of it, or `embed`, `layers`
    and `finish`.

    positions: those of the tokens, 0..T-1 by default.
    Through the layers go a `State` and `extra`, what a feature carries along: with experts in
    training a `Routing`.
    """

    def __init__(
        self,
        definition: ModelDef,
        shape: tuple[int, int],
        *,
        execution: Execution = SCANNED,
        positions: Positions = FULL_SEQUENCE,
    ):
        definition.check(execution, rows=shape[0])
        rows, length = shape
        ranks = definition.layout.ranks
        check(
            not definition.splits(execution) or length % ranks == 0,
            f"sequence_parallel splits {length} positions over {ranks} tensor ranks: give a multiple",
        )
        wire = definition.wire(execution)
        self.definition = definition
        self.execution = execution
        self.wire = wire
        parts = ((length, positions),)
        if execution.interleave == 2 and rows % 2 == 0:
            self.wire = Interleaved(wire, at=rows // 2)
            parts = ((length, half) for half in positions.halves(rows // 2))
        elif execution.interleave == 2:
            at = half_of_sequence(definition, length)
            self.wire = Interleaved(wire, at=at, axis=1)
            parts = zip((at, length - at), positions.parts(at), strict=True)
        self.steps = self.wire.layers(definition.topology.layers)
        of_model = functools.partial(
            LayerContext, definition.config, axes=wire.axes, kernel=definition.kernel
        )
        self.contexts = [of_model(size, positions=part) for size, part in parts]

    def __call__(self, params: Params, tokens: Array, *, caches: Any = None) -> tuple[Array, Any]:
        """The final, normed stream [B, T, D] for `tokens` [B, T], and the caches."""
        state, extra = self.embed(params, tokens)
        state, extra, caches = self.layers(state, extra, params=params, caches=caches)
        return self.finish(params, state, extra), caches

    def embed(self, params: Params, tokens: Array) -> tuple[State, Any]:
        """The state before the first layer, and `extra`, for `tokens` [B, T]."""
        definition = self.definition
        table = bind_whole(definition, params, "embedding")
        reduce = sequence.scatter_sequence if definition.splits(self.execution) else all_reduce
        return self.begin(table(tokens, axes=self.wire.axes, reduce=reduce)), None

    def begin(self, x: Array) -> State:
        """The state of a stream [B, T, D] to which nothing is still to be added."""
        dtype = self.definition.config.residual_dtype.value
        return self.wire.begin(x.astype(dtype), self.steps[0][0])

    def layers(
        self,
        state: State,
        extra: Any = None,
        *,
        params: Params,
        caches: Any = None,
        ranges: dict[str, range] | None = None,
        dims: Params | None = None,
    ) -> tuple[State, Any, Any]:
        """The state and `extra` after all layers, one stack of `params` after the other, and their
        caches.

        A stack is [L, ...], or (unrolled only) a tuple with each layer's own arrays. ranges: which
        of the model's layers each stack holds, by default all; dims: of stacks that hold other
        arrays than the definition has.
        """
        ranges = stacks(self.definition.config) if ranges is None else ranges
        dims = self.definition.dims if dims is None else dims
        dtype = self.definition.dtype
        updated = []
        for name, of in ranges.items():
            stack = params[name]
            own = caches if len(ranges) == 1 else layer_of(caches, slice(of.start, of.stop))
            keeps = gathers = None
            if self.definition.layout.fsdp > 1:
                vectors, gathers = dims_in_turn(dims[name])
                stack = unshard(stack, vectors, dtype=dtype)
                keeps = all_but_gathered
            state, extra, own = run_layers(
                functools.partial(self.layer, name=name, gathers=gathers),
                state,
                extra,
                params=stack,
                caches=own,
                steps=self.steps[of.start : of.stop],
                wire=self.wire,
                execution=self.execution,
                dtype=dtype,
                first=of.start,
                keeps=keeps,
            )
            updated.append(own)
        return state, extra, joined(updated)

    def layer(
        self,
        state: State,
        extra: Any,
        params: Params,
        cache: Any,
        *,
        steps: tuple[Step, ...],
        name: str,
        gathers: Any,
    ) -> tuple[State, Any, Any]:
        """The state, `extra` and the cache after one layer of the stack `name`.

        gathers: the dimensions of those of `params` that are a rank's shards along D; None where
            none are.
        """
        if gathers is not None:
            params = unshard(params, gathers, dtype=self.definition.dtype)
        wire, params = self.wire_of(params)
        of_layer = []  # the statistics of this layer's router
        module = self.definition.bind(name, params)
        on_routing = None if extra is None else of_layer.append
        state, cache = module(
            state,
            cache=cache,
            steps=steps,
            wire=wire,
            contexts=self.contexts,
            on_routing=on_routing,
        )
        if of_layer:
            summed = functools.reduce(functools.partial(jax.tree.map, jnp.add), of_layer)
            extra = extra.with_layer(summed)
        return state, extra, cache

    def wire_of(self, params: Params) -> tuple[AllReduce, Params]:
        """The wire of a layer with these arrays, and those of its modules."""
        return self.wire, params

    def finish(self, params: Params, state: State, extra: Any = None) -> Array:
        """The final, normed stream [B, T, D] after the last layer, to which all that is pending was
        added.
        """
        return self.normed(params, self.wire.flush(state))

    def normed(self, params: Params, x: Array) -> Array:
        """The final norm of a stream [B, T, D]."""
        definition = self.definition
        axes = self.wire.axes
        with jax.named_scope(HEAD):
            x = pvary(x, axes)
        x = bind_whole(definition, params, "final_norm")(x, dtype=definition.dtype)
        return sequence.gather(x, axes) if definition.splits(self.execution) else x


@functools.singledispatch
def forward_pass(definition: ModelDef, shape: tuple[int, int], **settings: Any) -> ForwardPass:
    """The `ForwardPass` of a model, or what a subclass of ModelDef has in its place."""
    return ForwardPass(definition, shape, **settings)


def hidden(
    definition: ModelDef, params: Params, tokens: Array, *, caches: Any = None, **settings: Any
) -> tuple[Array, Any]:
    """On one rank: the final, normed stream [B, T, D] for `tokens` [B, T], and the caches.

    settings: `execution` and `positions`, as a ForwardPass takes them.
    """
    return forward_pass(definition, tokens.shape, **settings)(params, tokens, caches=caches)


def half_of_sequence(definition: ModelDef, length: int) -> int:
    """How many of `length` positions have half of a layer's FLOPs: more than half, as the later
    ones attend to more.

    With E matrix elements of a layer and n H query channels, t positions take 2 E t + 2 n H t^2.
    """
    config = definition.config
    check(
        length > 1,
        "interleave=2 takes halves of the rows, or of their positions, of which there is one",
    )
    linear = (matrix_elements(definition) - config.vocab_size * config.d_model) / config.num_layers
    square = config.num_heads * config.head_dim
    half = (linear * length + square * length**2) / 2
    root = math.sqrt(linear**2 + 4 * square * half)
    at = round((root - linear) / (2 * square))
    if length >= 4 * TILE:
        at = TILE * round(at / TILE)
    return min(max(at, 1), length - 1)


def bind_whole(definition: ModelDef, params: Params, name: str) -> Module:
    """The module called `name`, its parameters gathered along the fsdp axis where there is one."""
    own = params[name]
    if definition.layout.fsdp > 1:
        own = unshard(own, definition.dims[name], dtype=definition.dtype)
    return definition.bind(name, own)


def logits(definition: ModelDef, params: Params, x: Array) -> Array:
    """On one rank: its share [B, T, V/ranks] of the float32 logits of a normed stream [B, T, D]."""
    return _head(definition, params).logits(x, axes=definition.layout.tensor)


def loss_sum(
    definition: ModelDef,
    params: Params,
    x: Array,
    targets: Array,
    *,
    weights: Array | None = None,
    z_loss: float = 0.0,
    chunk: int = 2048,
) -> Array:
    """On one rank: the summed loss in nats of a normed stream [B, T, D] and its `targets` [B, T].

    The rest as in `loss.cross_entropy_sum`; without `weights` every position counts.
    """
    return loss.cross_entropy_sum(
        x,
        output_table(definition, params),
        targets,
        jnp.ones(targets.shape, jnp.float32) if weights is None else weights,
        vocab_size=definition.config.vocab_size,
        axes=definition.layout.tensor,
        z_loss=z_loss,
        chunk=chunk,
    )


def output_table(definition: ModelDef, params: Params) -> Array:
    """On one rank: its rows [V/ranks, D] of the table that scores tokens, in the compute dtype."""
    table = _head(definition, params).table.get_value()
    return table.astype(definition.config.dtype.value)


def _head(definition, params):
    """What scores tokens."""
    name = "embedding" if definition.config.tie_embeddings else "head"
    return bind_whole(definition, params, name)


def _values(module: Module, dims: Params) -> Params:
    """A module's declared parameters; a tenth of the time that `nnx.state` takes."""
    values = {}
    for name, inner in dims.items():
        part = getattr(module, name)
        values[name] = _values(part, inner) if isinstance(inner, dict) else part.get_value()
    return values


class Transformer(Module):
    """A Llama-family decoder: `Transformer(preset("tiny"), rngs=nnx.Rngs(0),
    mesh=make_mesh(tensor=4))`.

    Its attributes are Flax modules (`model.layers.attention.query`), each parameter of which is a
    global array laid out over the mesh; the layers' parameters are stacked, [L, ...].
    """

    _define = staticmethod(define)

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs | None = None,
        mesh: Mesh | NamedMesh | None = None,
        params: Params | None = None,
    ):
        """Initial values by `rngs.params`, or `params` in their place, all of them.

        mesh: axes data, fsdp, tensor, or others' by `mesh_of`; by default that of `jax.set_mesh`,
            or else one device. The initial values do not depend on it.
        Raises UserError where the model cannot be split over the mesh, or `params` are another
        model's.
        """
        if not isinstance(config, ModelConfig):
            raise UserError(
                f"a Transformer takes a ModelConfig, such as preset('tiny'), not {config!r:.80}"
            )
        if (rngs is None) == (params is None):
            raise UserError(
                "a Transformer takes either rngs=nnx.Rngs(seed), for new weights, or params="
            )
        mesh = mesh_of((context_mesh() or make_mesh()) if mesh is None else mesh)
        config = with_ranks(config, tensor=mesh.shape["tensor"])
        self.definition = self._define(config, mesh=mesh)
        for name, module in self.definition.declare().items():
            setattr(self, name, module)
        if params is None:
            params = initialize(self.definition, key=next_key(rngs))
        else:
            check_params(params, expected=self.definition.abstract)
            nnx.update(self, params)

            def place(array, like):
                """`array` on the model's devices. jax's own are moved only to a caller's mesh, whose
                code goes by their types.
                """
                is_placed = mesh.is_own and isinstance(array, Array)
                is_abstract = isinstance(array, jax.ShapeDtypeStruct)
                return array if is_placed or is_abstract else jax.device_put(array, like.sharding)

            params = jax.tree.map(place, self.params, self.definition.abstract)
        nnx.update(self, params)

    @property
    def config(self) -> ModelConfig:
        return self.definition.config

    @property
    def mesh(self) -> Mesh:
        """The caller's; of `make_mesh`, where ranks share a key/value head, with the axes kv and
        group for tensor.
        """
        layout = self.definition.layout
        return layout.mesh if layout.given.is_own else layout.given.mesh

    @property
    def topology(self) -> Topology:
        return self.definition.topology

    @property
    def params(self) -> Params:
        """The plain nested dict of arrays that compiled functions take: what is declared, not what
        a user, or `nnx.capture`, has put beside it.
        """
        return _values(self, self.definition.dims)

    def __repr__(self):
        return f"{self.config}\n{self.mesh}\n{super().__repr__()}"

    def __call__(self, tokens: Array) -> Array:
        """Float32 logits [B, T, V] for integer tokens [B, T]; B must be divisible by data x fsdp.

        Compiled for the mesh's devices. Under `jax.jit`, `jax.grad` and the like it is a function
        like any other, and their program's options are the caller's:
        `model.definition.topology.compile_options(mesh, phase="train")`. Ids outside the vocabulary
        are a UserError, but for traced ones, which nobody knows yet. An array on a device is read
        for that, so the call waits until it is there.

        Its gradient has a `jax.jvp` (a Hessian times a vector), except with fsdp, and where a kernel of
        Pallas or cuDNN computes attention or experts: on TPUs, and on GPUs in bfloat16. The function
        itself has none.
        """
        batch_ranks = self.definition.layout.batch_ranks
        tokens = checked_tokens(tokens, batch_ranks=batch_ranks, vocab_size=self.config.vocab_size)
        return compiled_logits(self.definition)(self.params, tokens)


@cache_programs
def compiled_logits(definition: ModelDef, *, loop: Loop = Loop.SCAN) -> Compiled:
    """A compiled (params, tokens [B, T]) -> logits [B, T, V], the whole model in one shard_map.

    Raises UserError for another model's parameters.
    """
    execution = Execution(loop=loop)

    def local(params, tokens):
        run = forward_pass(definition, tokens.shape, execution=execution)
        state, extra = run.embed(params, tokens)
        state, extra, _ = run.layers(state, extra, params=params)
        return logits(definition, params, run.finish(params, state, extra))

    layout = definition.layout
    in_dims = definition.dims, "BT"
    ranked = over_ranks(local, layout=layout, in_dims=in_dims, out_dims="BTV")
    meshed = over_mesh(ranked, layout=layout, in_dims=in_dims, out_dims="BTV")

    def stripped(params, tokens):
        return meshed(params, tokens)[..., : definition.config.vocab_size]

    traits = definition.traits(execution, phase=Phase.PREFILL)
    on_own = on_own_mesh(stripped, layout=layout, out_dims="BTV")

    @functools.wraps(stripped)
    def whole(params, tokens):
        check_params(params, expected=definition.abstract)  # once a shape, while it is traced
        return on_own(as_stored(params, dims=definition.dims, layout=layout), tokens)

    return Compiled(whole, mesh=layout.mesh, traits=traits)
