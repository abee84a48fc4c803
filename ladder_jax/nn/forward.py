"""A forward pass on one rank, in parts: embedding, layers (all, or one range after another), final norm."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ladder_jax import residual
from ladder_jax.config import CollectiveMatmul, ExpertParallelism, Launch, Loop, Remat, check_collective_matmul
from ladder_jax.config.fields import check
from ladder_jax.nn import loss, modules, prefetch
from ladder_jax.nn.layer import layer_context
from ladder_jax.nn.model_def import ModelDef, Params
from ladder_jax.nn.parameter import LAYERS, stacks
from ladder_jax.nn.positions import FULL_SEQUENCE, Positions
from ladder_jax.parallel import all_reduce, fsdp, pvary
from ladder_jax.parallel.collectives import HEAD
from ladder_jax.residual import State, anneal, sequence
from ladder_jax.residual.layers import run_layers

LADDER_FRACTION = "ladder_fraction"
"""The name of each layer's ladder fraction, [L], beside the modules of a layer stack (see residual/anneal.py)."""


class ForwardPass:
    """One forward pass over blocks of `length` tokens. The settings are those of `nn.hidden`."""

    def __init__(
        self,
        definition: ModelDef,
        length: int,
        *,
        loop_form: Loop = Loop.SCAN,
        remat: Remat = Remat.NONE,
        positions: Positions = FULL_SEQUENCE,
        launch: Launch = Launch.CHAINED,
        sequence_parallel: bool = False,
        collective_matmul: CollectiveMatmul = CollectiveMatmul.NONE,
    ):
        config, layout = definition.config, definition.layout
        check_collective_matmul(
            collective_matmul,
            model=config,
            sequence_parallel=sequence_parallel,
            names=("collective_matmul", "sequence_parallel=True"),
        )
        self._definition, self._loop, self._remat, self._side = definition, loop_form, remat, None
        self._dtype, self._axes = jnp.dtype(config.dtype.value), layout.tensor
        self._split = sequence_parallel and layout.ranks > 1 and not layout.emulated
        normalise = lambda x: modules.normalise(x, eps=config.norm_eps).astype(self._dtype)
        topology = definition.topology
        split = dict(normalise=normalise, collective_matmul=collective_matmul)
        self.exchanges = self._split and definition.experts is ExpertParallelism.EXCHANGE
        if self.exchanges:
            from ladder_jax.residual import exchange

            self._steps = exchange.layers(topology, normalise=normalise, moe=config.moe)
        else:
            self._steps = sequence.layers(topology, **split) if self._split else topology.layers
        self._context = layer_context(
            config,
            length,
            axes=self._axes,
            kernel=definition.kernel,
            positions=positions,
            launch=launch,
            normalised=self._split,
            exchanges=self.exchanges,
        )
        if config.side is not None:
            from ladder_jax.nn.side_pass import SidePass

            check(not self._split, "model.side reads whole streams: not with sequence_parallel")
            self._side = SidePass(definition, length, positions=positions, loop=loop_form, remat=remat)
            self._remat = Remat.NONE  # only the side network has a backward pass

    def embed(self, params: Params, tokens: jax.Array) -> State:
        """The state before the first layer, for `tokens` [B, T]."""
        definition = self._definition
        table = definition.bind("embedding", unshard(definition, "embedding", params["embedding"]))
        reduce = sequence.scatter_sequence if self._split else all_reduce
        state = self.begin(table.lookup(tokens, axes=self._axes, dtype=self._dtype, reduce=reduce))
        return state if self._side is None else self._side.begin(params, state)

    def begin(self, x: jax.Array) -> State:
        """The state of a stream [B, T, D] to which nothing is still to be added."""
        x = x.astype(self._definition.config.residual_dtype.value)
        return residual.begin(x, topology=self._definition.topology, axes=self._axes)

    def all_layers(self, state: State, params: Params, *, caches: Any = None) -> tuple[State, Any]:
        """The state after all layers, one stack of `params` after the other, and the caches in their form."""
        ranges, updated = stacks(self._definition.config), []
        if len(ranges) == 1:
            return self.layers(state, params[LAYERS], caches=caches)
        for name, of in ranges.items():
            part = slice(of.start, of.stop)
            own = caches[part] if isinstance(caches, tuple) else jax.tree.map(lambda a: a[part], caches)
            state, own = self.layers(state, params[name], caches=own, first=of.start, name=name)
            updated.append(own)
        if isinstance(caches, tuple):
            return state, sum(updated, ())
        return state, jax.tree.map(lambda *parts: jnp.concatenate(parts), *updated)

    def layers(
        self,
        state: State,
        stack: Any,
        *,
        caches: Any = None,
        first: int = 0,
        name: str = LAYERS,
        dims: Any = None,
        trains: Any = None,
    ) -> tuple[State, Any]:
        """The state after the layers from `first` on that `stack` holds, and their caches.

        stack: [L, ...], or (unrolled only) a tuple with each layer's own arrays. name: of the model's stack. dims: of
        one that holds other arrays than the definition has. trains: as in `fsdp.FsdpLayer`; what does not must not be
        differentiated anyway.
        """
        definition, layout = self._definition, self._definition.layout
        dims = definition.dims[name] if dims is None else dims
        count = len(stack) if isinstance(stack, tuple) else jax.tree.leaves(stack)[0].shape[0]
        settings = dict(
            steps=self._steps[first : first + count],
            loop=self._loop,
            remat=self._remat,
            axes=self._axes,
            dtype=self._dtype,
            first=first,
        )
        body = functools.partial(self._layer, name)
        if layout.fsdp > 1:
            fsdp_layer = fsdp.FsdpLayer(jax.tree.map(lambda dims: dims.removeprefix("L"), dims), self._dtype, trains)
            stack = fsdp.with_vectors(stack, dims)
            if caches is None and self._side is None:
                return prefetch.run_layers(body, state, params=stack, fsdp_layer=fsdp_layer, **settings), None
            body = lambda state, layer, cache, steps: self._layer(name, state, fsdp_layer.gather(layer), cache, steps)
        return run_layers(body, state, params=stack, caches=caches, **settings)

    def stream(self, state: State) -> jax.Array:
        """The stream [B, T, D] (of a split one this rank's positions), to which all that is pending was added."""
        flush = sequence.flush if self._split else residual.flush
        if self.exchanges:
            from ladder_jax.residual.exchange import flush
        return flush(state, axes=self._axes)

    def finish(self, params: Params, state: State) -> jax.Array:
        """The final, normed stream [B, T, D] after the last layer."""
        definition, x = self._definition, self.stream(state)
        x = x if self._side is None else self._side.end(params, x, state)
        with jax.named_scope(HEAD):
            x = pvary(x, self._axes)
        final = definition.bind("final_norm", unshard(definition, "final_norm", params["final_norm"]))
        x = final(x, dtype=self._dtype)
        return sequence.gather(x, self._axes) if self._split else x

    def _layer(self, name, state, layer, cache, steps):
        if LADDER_FRACTION in layer:
            steps = anneal.steps(steps, ladder_fraction=layer[LADDER_FRACTION])
            layer = {part: module for part, module in layer.items() if part != LADDER_FRACTION}
        plain = functools.partial(self._plain_layer, name)
        if self._side is not None:
            return self._side.around(plain, state, layer, cache, steps)
        return plain(state, layer, cache, steps)

    def _plain_layer(self, name, state, layer, cache, steps):
        return self._definition.bind(name, layer).advance(state, cache, steps=steps, context=self._context)


def unshard(definition: ModelDef, name: str, params: Params) -> Params:
    """The parameters of the module called `name`, gathered along the fsdp axis where there is one."""
    if definition.layout.fsdp == 1:
        return params
    return fsdp.unshard(params, definition.dims[name], dtype=jnp.dtype(definition.config.dtype.value))


def hidden(
    definition: ModelDef,
    params: Params,
    tokens: jax.Array,
    *,
    loop_form: Loop = Loop.SCAN,
    remat: Remat = Remat.NONE,
    caches: Any = None,
    positions: Positions = FULL_SEQUENCE,
    launch: Launch = Launch.CHAINED,
    sequence_parallel: bool = False,
    collective_matmul: CollectiveMatmul = CollectiveMatmul.NONE,
) -> tuple[jax.Array, Any]:
    """On one rank: the final, normed stream [B, T, D] for `tokens` [B, T], and the caches.

    `positions` are those of the tokens: 0..T-1 by default. With `sequence_parallel` a
    rank keeps T/ranks positions of the stream between sublayers: see residual/sequence.py.
    """
    split = dict(sequence_parallel=sequence_parallel, collective_matmul=collective_matmul)
    settings = dict(loop_form=loop_form, remat=remat, positions=positions, launch=launch)
    run = ForwardPass(definition, tokens.shape[1], **settings, **split)
    state, caches = run.all_layers(run.embed(params, tokens), params, caches=caches)
    return run.finish(params, state), caches


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
