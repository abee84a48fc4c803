"""A forward pass on one rank, in parts: embedding, layers (all, or one range after another), final norm, scores."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ladder_jax.config import SCANNED, Execution
from ladder_jax.config.fields import check
from ladder_jax.nn import loss
from ladder_jax.nn.model_def import ModelDef, Params, matrix_elements
from ladder_jax.nn.modules import LayerContext
from ladder_jax.nn.parameter import LAYERS, stacks
from ladder_jax.nn.positions import FULL_SEQUENCE, Positions
from ladder_jax.parallel import all_reduce, fsdp, pvary
from ladder_jax.parallel.collectives import HEAD
from ladder_jax.residual import AllReduce, State, Step
from ladder_jax.residual.interleave import Interleaved
from ladder_jax.residual.loop import run_layers
from ladder_jax.residual.wires import sequence

TILE = 128  # of positions, for which matmuls and attention kernels are best
GIVEN = "given"
"""The name, beside the modules of a layer, of arrays that are no parameters (see `ForwardPass.layer_range`)."""


class ForwardPass:
    """One forward pass on one rank, over tokens of `shape` [B, T]: all of it, or `embed`, `layers` and `finish`.

    positions: those of the tokens, 0..T-1 by default.
    Through the layers go a `State` and `extra`, what a feature carries along: with experts in training a `Routing`.
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
        (rows, length), wire = shape, definition.wire(execution)
        self.definition, self.execution = definition, execution
        self.wire, parts = wire, ((length, positions),)
        if execution.interleave == 2 and rows % 2 == 0:
            self.wire = Interleaved(wire, at=rows // 2)
            parts = ((length, half) for half in positions.halves(rows // 2))
        elif execution.interleave == 2:
            at = half_of_sequence(definition, length)
            self.wire = Interleaved(wire, at=at, axis=1)
            parts = zip((at, length - at), positions.parts(at), strict=True)
        self.steps = self.wire.layers(definition.topology.layers)
        of_model = functools.partial(LayerContext.of, definition.config, axes=wire.axes, kernel=definition.kernel)
        self.contexts = [of_model(size, positions=part) for size, part in parts]

    def __call__(self, params: Params, tokens: jax.Array, *, caches: Any = None) -> tuple[jax.Array, Any]:
        """The final, normed stream [B, T, D] for `tokens` [B, T], and the caches."""
        state, extra = self.embed(params, tokens)
        state, extra, caches = self.layers(state, extra, params=params, caches=caches)
        return self.finish(params, state, extra), caches

    def embed(self, params: Params, tokens: jax.Array) -> tuple[State, Any]:
        """The state before the first layer, and `extra`, for `tokens` [B, T]."""
        definition = self.definition
        table = definition.bind("embedding", unshard(definition, "embedding", params["embedding"]))
        reduce = sequence.scatter_sequence if definition.splits(self.execution) else all_reduce
        return self.begin(table(tokens, axes=self.wire.axes, reduce=reduce)), None

    def begin(self, x: jax.Array) -> State:
        """The state of a stream [B, T, D] to which nothing is still to be added."""
        return self.wire.begin(x.astype(self.definition.config.residual_dtype.value), self.steps[0][0])

    def layers(self, state: State, extra: Any = None, *, params: Params, caches: Any = None) -> tuple[State, Any, Any]:
        """The state and `extra` after all layers, one stack of `params` after the other, and the caches."""
        ranges, updated = stacks(self.definition.config), []
        if len(ranges) == 1:
            return self.layer_range(state, extra, stack=params[LAYERS], caches=caches)
        for name, of in ranges.items():
            part = slice(of.start, of.stop)
            own = caches[part] if isinstance(caches, tuple) else jax.tree.map(lambda a: a[part], caches)
            settings = dict(stack=params[name], caches=own, first=of.start, name=name)
            state, extra, own = self.layer_range(state, extra, **settings)
            updated.append(own)
        if isinstance(caches, tuple):
            return state, extra, sum(updated, ())
        return state, extra, jax.tree.map(lambda *parts: jnp.concatenate(parts), *updated)

    def layer_range(
        self,
        state: State,
        extra: Any = None,
        *,
        stack: Any,
        caches: Any = None,
        first: int = 0,
        name: str = LAYERS,
        dims: Any = None,
        given: Any = None,
        wire_of: Callable[[AllReduce, Any], AllReduce] = lambda wire, given: wire,
    ) -> tuple[State, Any, Any]:
        """The state and `extra` after the layers from `first` on that `stack` holds, and their caches.

        stack: [L, ...], or (unrolled only) a tuple with each layer's own arrays. name: of the model's stack. dims: of
        one that holds other arrays than the definition has. given: arrays [L, ...] without gradients, of which
        `wire_of` makes each layer's wire.
        """
        definition = self.definition
        dims = definition.dims[name] if dims is None else dims
        count = len(stack) if isinstance(stack, tuple) else jax.tree.leaves(stack)[0].shape[0]
        dtype = jnp.dtype(definition.config.dtype.value)
        if given is not None:
            stack, dims = {**stack, GIVEN: given}, {**dims, GIVEN: "L"}
        body = functools.partial(self.layer, name=name, wire_of=wire_of)
        settings = dict(
            steps=self.steps[first : first + count],
            wire=self.wire,
            execution=self.execution,
            dtype=dtype,
            first=first,
        )
        if definition.layout.fsdp > 1:
            of_layer, of_whole = jax.tree.map(lambda dims: dims.removeprefix("L"), dims), body
            stack = fsdp.with_vectors(stack, dims)
            settings["keeps"] = fsdp.all_but_gathered

            def body(state, extra, layer, cache, steps):
                return of_whole(state, extra, fsdp.unshard_matrices(layer, of_layer, dtype=dtype), cache, steps=steps)

        return run_layers(body, state, extra, params=stack, caches=caches, **settings)

    def layer(
        self,
        state: State,
        extra: Any,
        params: Params,
        cache: Any,
        *,
        steps: tuple[Step, ...],
        name: str,
        wire_of: Callable[[AllReduce, Any], AllReduce],
    ) -> tuple[State, Any, Any]:
        """The state, `extra` and the cache after one layer of the stack `name`."""
        wire, of_layer = self.wire, []  # the statistics of this layer's router
        if GIVEN in params:
            wire = wire_of(wire, params[GIVEN])
            params = {part: module for part, module in params.items() if part != GIVEN}
        module = self.definition.bind(name, params)
        on_routing = None if extra is None else of_layer.append
        settings = dict(steps=steps, wire=wire, contexts=self.contexts, on_routing=on_routing)
        state, cache = module(state, cache=cache, **settings)
        if of_layer:
            extra = extra.with_layer(functools.reduce(functools.partial(jax.tree.map, jnp.add), of_layer))
        return state, extra, cache

    def stream(self, state: State) -> jax.Array:
        """The stream [B, T, D] (of a split one this rank's positions), to which all that is pending was added."""
        return self.wire.flush(state)

    def finish(self, params: Params, state: State, extra: Any = None) -> jax.Array:
        """The final, normed stream [B, T, D] after the last layer."""
        return self.normed(params, self.stream(state))

    def normed(self, params: Params, x: jax.Array) -> jax.Array:
        """The final norm of a stream [B, T, D]."""
        definition, axes = self.definition, self.wire.axes
        with jax.named_scope(HEAD):
            x = pvary(x, axes)
        final = definition.bind("final_norm", unshard(definition, "final_norm", params["final_norm"]))
        x = final(x, dtype=jnp.dtype(definition.config.dtype.value))
        return sequence.gather(x, axes) if definition.splits(self.execution) else x


@functools.singledispatch
def forward_pass(definition: ModelDef, shape: tuple[int, int], **settings: Any) -> ForwardPass:
    """The `ForwardPass` of a model, or what a subclass of ModelDef has in its place."""
    return ForwardPass(definition, shape, **settings)


def hidden(
    definition: ModelDef, params: Params, tokens: jax.Array, *, caches: Any = None, **settings: Any
) -> tuple[jax.Array, Any]:
    """On one rank: the final, normed stream [B, T, D] for `tokens` [B, T], and the caches.

    settings: `execution` and `positions`, as a ForwardPass takes them.
    """
    return forward_pass(definition, tokens.shape, **settings)(params, tokens, caches=caches)


def half_of_sequence(definition: ModelDef, length: int) -> int:
    """How many of `length` positions have half of a layer's FLOPs: more than half, as the later ones attend to more.

    With E matrix elements of a layer and n H query channels, t positions take 2 E t + 2 n H t^2.
    """
    config = definition.config
    check(length > 1, "interleave=2 takes halves of the rows, or of their positions, of which there is one")
    linear = (matrix_elements(definition) - config.vocab_size * config.d_model) / config.num_layers
    square = config.num_heads * config.head_dim
    half = (linear * length + square * length**2) / 2
    at = round((math.sqrt(linear**2 + 4 * square * half) - linear) / (2 * square))
    if length >= 4 * TILE:
        at = TILE * round(at / TILE)
    return min(max(at, 1), length - 1)


def unshard(definition: ModelDef, name: str, params: Params) -> Params:
    """The parameters of the module called `name`, gathered along the fsdp axis where there is one."""
    if definition.layout.fsdp == 1:
        return params
    return fsdp.unshard(params, definition.dims[name], dtype=jnp.dtype(definition.config.dtype.value))


def logits(definition: ModelDef, params: Params, x: jax.Array) -> jax.Array:
    """On one rank: its share [B, T, V/ranks] of the float32 logits of a normed stream [B, T, D]."""
    name = "embedding" if definition.config.tie_embeddings else "head"
    head = definition.bind(name, unshard(definition, name, params[name]))
    return head.logits(x, axes=definition.layout.tensor)


def loss_sum(
    definition: ModelDef,
    params: Params,
    x: jax.Array,
    targets: jax.Array,
    *,
    weights: jax.Array | None = None,
    z_loss: float = 0.0,
    chunk: int = 2048,
) -> jax.Array:
    """On one rank: the summed loss in nats of a normed stream [B, T, D] and its `targets` [B, T].

    The rest as in `loss.cross_entropy_sum`; without `weights` every position counts.
    """
    return loss.cross_entropy_sum(
        x,
        output_table(definition, params),
        targets,
        jnp.ones(targets.shape) if weights is None else weights,
        vocab_size=definition.config.vocab_size,
        axes=definition.layout.tensor,
        z_loss=z_loss,
        chunk=chunk,
    )


def output_table(definition: ModelDef, params: Params) -> jax.Array:
    """On one rank: its rows [V/ranks, D] of the table that scores tokens, in the compute dtype."""
    name = "embedding" if definition.config.tie_embeddings else "head"
    table = definition.bind(name, unshard(definition, name, params[name])).table.get_value()
    return table.astype(definition.config.dtype.value)
