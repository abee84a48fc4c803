"""Layers of your own under a topology: `run` for functions and parameters, `Stack` as a Flax
module.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax import Array

from ladder_jax.config import Execution, Loop, Remat
from ladder_jax.config.fields import check, check_type
from ladder_jax.errors import UserError
from ladder_jax.parallel.collectives import Axes, pvary, rank
from ladder_jax.residual.interleave import Interleaved
from ladder_jax.residual.loop import run_layers
from ladder_jax.residual.recurrence import Sublayer, check_stream
from ladder_jax.residual.topologies import Topology

# one layer's parameters -> its sublayers (attention, MLP)
Blocks = Callable[[Any], Sequence[Sublayer]]


def run(
    topology: Topology,
    blocks: Blocks,
    x: Array,
    *,
    params: Any,
    axes: Axes = ("tensor",),
    loop: Loop | str = Loop.SCAN,
    remat: Remat | str = Remat.NONE,
    interleave: int = 1,
) -> Array:
    """The residual stream [B, T, D] after all layers, equal on all ranks of `axes`.

    blocks: from one layer's parameters to its two sublayers (three of "farskip"), normalisation
        included. A sublayer is a function from [B, T, D] to this rank's partial sum [B, T, D]; it
        contains no `psum`, and adds an output bias by `on_one_rank`.
    x: [B, T, D], such as the embedding, equal on all ranks of `axes`.
    params: a pytree of stacked arrays [L, ...], a rank's shards of them. With `loop="unrolled"` it
        may be a list or tuple of each layer's own.
    axes: the mesh axes of the tensor-parallel ranks, inside `jax.shard_map`; () on one device.
    loop: "scan", one compiled body for all layers, or "unrolled".
    remat: what the backward pass recomputes: "none", "full", "save-matmuls" or "offload".
    interleave: 2 takes two halves of the rows in turn (see interleave.py): the same function, whose
        sums over the ranks stand beside the other half's sublayers.

    Raises UserError for params of another number of layers, for layers of another number of
    sublayers, and for a sublayer that reduces its own output.
    """
    execution = Execution(loop=loop, remat=remat, interleave=interleave)
    return _run(topology, blocks, x, params=params, axes=axes, execution=execution)[0]


def _run(
    topology: Topology,
    blocks: Blocks,
    x: Array,
    *,
    params: Any,
    axes: Axes,
    execution: Execution,
    changed: Callable[[], Any] | None = None,
) -> tuple[Array, Any]:
    """`run`, and what `changed` returns after each layer's sublayers, stacked."""
    check_type("topology", topology, Topology)
    check_stream(x)
    wire = topology.wire(axes)
    if execution.interleave == 2:
        rows = x.shape[0]
        check(rows % 2 == 0, f"interleave=2 takes halves of the rows, and {rows} is odd")
        wire = Interleaved(wire, at=rows // 2)
    steps = wire.layers(topology.layers)
    own = execution.loop is Loop.UNROLLED and type(params) in (list, tuple)  # no named tuple
    if own:
        params = tuple(params)
        counts = {len(params)}
    else:
        without = "an array without layers"
        params = [params]  # as `run_layers` takes any tuple for each layer's own
        arrays = jax.tree.leaves(params)
        counts = {a.shape[0] if getattr(a, "ndim", 0) else without for a in arrays}
    held = ", ".join(sorted(map(str, counts))) or "none"
    if counts != {topology.num_layers}:
        raise UserError(
            f"params must hold {topology.num_layers} layers, as the topology does: arrays [{topology.num_layers}, ...],"
            f" or with loop='unrolled' a list of each layer's own; they hold {held}"
        )

    names = ("attention", "routed experts", "shared expert")
    names = names if topology.farskip else ("attention", "MLP")

    def of_layer(layer):
        sublayers = blocks(layer if own else layer[0])
        if len(sublayers) != len(names):
            raise UserError(
                f"a layer of this topology has the sublayers ({', '.join(names)}), not {len(sublayers)}"
            )
        return sublayers

    def body(state, extra, layer, cache, steps):
        sublayers = [lambda x, of=of: of(x).astype(dtype) for of in of_layer(layer)]
        sublayers = (sublayers, sublayers) if execution.interleave == 2 else sublayers
        for step in steps:
            with jax.named_scope("_".join(f"sublayer_{index}" for index in step.sublayers)):
                state = wire.advance(state, step, sublayers)
        return state, extra, changed and changed()

    def outputs(params, x):
        first = params[0] if own else jax.tree.map(lambda a: a[0], params)
        return [sublayer(pvary(x, axes)) for sublayer in of_layer(first)], changed and changed()

    # one for all, as any of them may be what a scan carries from layer to layer
    dtype = jnp.result_type(*jax.eval_shape(outputs, params, x)[0])
    state, _, of_layers = run_layers(
        body,
        wire.begin(x, steps[0][0]),
        params=params,
        caches=changed and {},
        steps=steps,
        wire=wire,
        execution=execution,
        dtype=dtype,
    )
    return wire.flush(state), of_layers


def _attention_and_mlp(layer):
    """A function with a name, which pickle can store."""
    return layer.attention, layer.mlp


class Stack(nnx.Module):
    """Layers of your own as one module: `Stack(Block, topology=topology, rngs=nnx.Rngs(0))(x)`.

    layer: makes one layer, an `nnx.Module`, when called as `layer(rngs=rngs)` under `nnx.vmap`;
        each layer has keys of its own. `stack.layers` is that module with stacked parameters
        [L, ...].
    sublayers: from one such module to its two sublayers, by default its attributes `attention` and
        `mlp`.
    axes, loop, remat, interleave: as in `run`.

    Variables that a sublayer changes while it runs, such as dropout's counts and batch statistics,
    are changed in `stack.layers`, as in any Flax module.
    """

    def __init__(
        self,
        layer: Callable[..., nnx.Module],
        *,
        topology: Topology,
        rngs: nnx.Rngs,
        sublayers: Callable[[Any], Sequence[Sublayer]] = _attention_and_mlp,
        axes: Axes = ("tensor",),
        loop: Loop | str = Loop.SCAN,
        remat: Remat | str = Remat.NONE,
        interleave: int = 1,
    ):
        check_type("topology", topology, Topology)
        check_type("rngs", rngs, nnx.Rngs)
        self.topology = topology
        self.sublayers = sublayers
        # hashable, so that the graph can be a static argument of jax.jit
        self.axes = axes
        self.execution = Execution(loop=loop, remat=remat, interleave=interleave)
        # of their own, as a layer may keep its `rngs`
        create = nnx.vmap(lambda rngs: layer(rngs=rngs))
        self.layers = create(rngs.split(topology.num_layers))

    def __repr__(self) -> str:
        count = sum(array.size for array in jax.tree.leaves(nnx.state(self.layers, nnx.Param)))
        return f"Stack of {type(self.layers).__name__}, {count:,} parameters\n{self.topology!r}"

    def __call__(self, x: Array) -> Array:
        """[B, T, D] to [B, T, D]."""
        graph, params = nnx.split(self.layers)
        module = before = None

        def blocks(layer):
            nonlocal module, before
            module = nnx.merge(graph, layer)
            before = _values(module)
            return self.sublayers(module)

        def changed():
            """What the sublayers of the newest module have changed, which is then let go: its
            tracers would leak.
            """
            nonlocal module, before
            after = _values(module)
            found = {path: after[path] for path in before if after[path] is not before[path]}
            module = before = None
            return found

        settings = dict(axes=self.axes, execution=self.execution, changed=changed)
        stream, updated = _run(self.topology, blocks, x, params=params, **settings)
        if updated:
            nnx.update(self.layers, traverse_util.unflatten_dict(updated))
        return stream


def _values(module):
    """Of each of its variables, by its path."""
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(module))}


def on_one_rank(bias: Array, axes: Axes) -> Array:
    """`bias` on the first rank of `axes` and zeros on the others, so that a sum over the ranks
    holds it once.
    """
    return jnp.where(rank(axes) == 0, bias, 0)
