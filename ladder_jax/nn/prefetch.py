"""The loop over layers whose matrices are split over the fsdp axis, with a VJP of its own: one layer ahead.

    forward, layer l      gather the matrices of l+1                                    beside its compute
    backward, layer l     gather those of l-1 again; reduce-scatter the gradients       beside its compute
                          of l+1

What stands beside a layer is tied to the state that enters it, and to what stood beside the layer before, so that a
compiler can neither begin it earlier, nor merge it with its neighbours', nor take the second gather for the first.
The loop keeps the activations of every layer, and the matrices of two. That is what its own VJP is for: jax's would
keep whatever a scan carries, the prefetched matrices of all layers among it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax.config import Execution, Loop, Remat
from ladder_jax.parallel.collectives import pvary, varying
from ladder_jax.parallel.fsdp import FsdpLayer
from ladder_jax.residual import AllReduce, State, Step
from ladder_jax.residual.loop import Body, rematerialised, runs_of, unstacked

Carry = tuple[State, Any]  # the state, and what goes along (see residual/loop.py)
LayerOf = Callable[[Carry, Any], Carry]  # (carry, one layer's whole parameters) -> carry


def run_layers(
    body: Body,
    state: State,
    extra: Any,
    *,
    params: Any,
    steps: tuple[tuple[Step, ...], ...],
    wire: AllReduce,
    execution: Execution,
    fsdp_layer: FsdpLayer,
    dtype: jnp.dtype,
    first: int,
) -> Carry:
    """`residual.loop.run_layers` without caches, where `params` are this rank's shares along the fsdp axis."""
    remat = execution.remat

    def layer(kind):
        # Loop.SCAN, because this loop's own barriers keep a recomputation from being merged.
        of_layer = rematerialised(body, steps=kind, remat=remat, loop=Loop.SCAN, axes=wire.axes)
        return lambda carry, whole: of_layer(*carry, whole, None)[:2]

    unrolled = [(0, len(steps), 1)]
    for start, period, repeats in unrolled if execution.loop is Loop.UNROLLED else runs_of(steps):
        stop = start + period * repeats
        if repeats == 1:
            scopes, arrays = [f"layer_{first + n}" for n in range(start, stop)], unstacked(params)[start:stop]
        else:
            scopes = [f"layers_{first + start}_to_{first + stop - 1}"] * period
            arrays = jax.tree.map(lambda a: a[start:stop], params)
            state = wire.fill(state, sum(steps[start : start + period], ()), dtype=dtype)
        layers = [layer(kind) for kind in steps[start : start + period]]
        run = Run(layers, scopes, repeats, fsdp_layer, recomputes=remat is not Remat.NONE)
        state, extra = run((state, extra), arrays)
    return state, extra


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of layers: `turns` times the same `layers`, or, if it turns once, any layers one after another.

    scopes: the names of the layers of one turn, which the schedule's report reads.
    recomputes: a layer's pullback computes the layer again.
    """

    layers: Sequence[LayerOf]
    scopes: Sequence[str]
    turns: int
    fsdp_layer: FsdpLayer
    recomputes: bool

    def __call__(self, state: Carry, params: Any) -> Carry:
        """params: a tuple with each layer's shares, or (of several turns) their stack [turns * layers, ...].

        What does not train of them (`FsdpLayer.trains`) has no gradient: none is computed, and none is scattered.
        """
        loop = jax.custom_vjp(lambda state, params: self._forward(state, params, _compute)[0][0])
        loop.defvjp(self._keep, self._backward)
        return loop(state, params)

    def _forward(self, state: Carry, params: Any, compute: Callable) -> tuple[tuple[Carry, Any], Any]:
        """((the last state, the last layer's whole parameters), what `compute` kept of each layer)."""

        def turn(carry, first):
            (state, whole), kept = carry, []
            for index, (layer, scope) in enumerate(zip(self.layers, self.scopes, strict=True)):
                ahead = self._take(params, first * len(self.layers) + index + 1)
                state, (whole, ahead) = _tie(state, (whole, ahead))
                following = whole if ahead is None else self._gather(ahead, index + 1)
                with jax.named_scope(scope):
                    state, of_layer = compute(layer, state, whole)
                kept.append(of_layer)
                whole = following
            return (state, whole), kept

        carry = (state, self._gather(self._take(params, 0), 0))
        return turn(carry, 0) if self.turns == 1 else lax.scan(turn, carry, jnp.arange(self.turns))

    def _keep(self, state: Carry, params: Any) -> tuple[Carry, Any]:
        (state, last), kept = self._forward(
            state, params, functools.partial(_pull_back, trained=self.fsdp_layer.trained)
        )
        return state, (params, last, kept)

    def _backward(self, residuals: tuple, gradient: Carry) -> tuple[Carry, Any]:
        params, last, kept = residuals
        gradients = self._no_gradients(params)

        def turn(carry, of_turn):
            first, kept = of_turn
            gradient, whole, pending, given, gradients = carry
            for index in reversed(range(len(self.layers))):
                layer = first * len(self.layers) + index
                ahead = self._take(params, layer - 1)
                gradient, (whole, ahead, pending, given) = _tie(gradient, (whole, ahead, pending, given))
                gradients = _write(gradients, layer + 2, given)
                given = None if pending is None else self._scatter(pending, index + 1)
                preceding = whole if ahead is None else self._gather(ahead, index - 1)
                with jax.named_scope(self.scopes[index]):
                    gradient, pending = kept[index].pull_back(gradient, whole, tied=self.recomputes)
                whole = preceding
            return (gradient, whole, pending, given, gradients), None

        if self.turns == 1:
            carry, _ = turn((gradient, last, None, None, gradients), (0, kept))
        else:
            # The first turns give back zeros, to places that later turns write again.
            zero = lambda a, dtype: pvary(jnp.zeros(a.shape, dtype), varying(a))
            pending = [zero(a, a.dtype) for a in self.fsdp_layer.trained(last)]
            given = [zero(a[0], a.dtype) for a in self.fsdp_layer.trained(params)]
            turns = jnp.arange(self.turns)
            carry, _ = lax.scan(turn, (gradient, last, pending, given, gradients), (turns, kept), reverse=True)
        gradient, _, pending, given, gradients = carry
        gradient, (pending, given) = _tie(gradient, (pending, given))
        gradients = _write(_write(gradients, 1, given), 0, self._scatter(pending, 0))
        if isinstance(params, tuple):
            return gradient, tuple(map(self.fsdp_layer.with_frozen, params, gradients))
        return gradient, self.fsdp_layer.with_frozen(params, gradients)

    def _gather(self, shares: Any, index: int) -> Any:
        with jax.named_scope(self.scopes[index % len(self.scopes)]):
            return self.fsdp_layer.gather(shares)

    def _scatter(self, gradients: Any, index: int) -> Any:
        with jax.named_scope(self.scopes[index % len(self.scopes)]):
            return self.fsdp_layer.scatter(gradients)

    def _take(self, params: Any, layer: int | jax.Array) -> Any:
        """A layer's shares. Past either end: None, or (with several turns) the last or first layer's."""
        if isinstance(params, tuple):
            return params[layer] if 0 <= layer < len(params) else None
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, _inside(layer, a), keepdims=False), params)

    def _no_gradients(self, params: Any) -> Any:
        if isinstance(params, tuple):
            return [None] * len(params)
        return tuple(pvary(jnp.zeros(a.shape, a.dtype), varying(a)) for a in self.fsdp_layer.trained(params))


def _write(gradients: Any, layer: int | jax.Array, given: Any) -> Any:
    """`gradients` with a layer's: in place, as a list's item or in the stacks, a tuple."""
    if isinstance(gradients, list):
        if given is not None:
            gradients[layer] = given
        return gradients
    write = lambda stack, a: lax.dynamic_update_index_in_dim(stack, a.astype(stack.dtype), _inside(layer, stack), 0)
    return tuple(map(write, gradients, given))


def _inside(layer: int | jax.Array, stack: jax.Array) -> jax.Array:
    return jnp.clip(layer, 0, stack.shape[0] - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Kept:
    """A layer's pullback without the layer's whole parameters. places: where among its leaves they were, which."""

    leaves: list[jax.Array | None]
    structure: Any = dataclasses.field(metadata=dict(static=True))
    places: tuple[tuple[int, int], ...] = dataclasses.field(metadata=dict(static=True))

    def pull_back(self, gradient: Carry, whole: Any, *, tied: bool) -> tuple[Carry, Any]:
        leaves, arrays = list(self.leaves), jax.tree.leaves(whole)
        for place, which in self.places:
            leaves[place] = arrays[which]
        if tied:  # as in residual/remat.py: recomputation overlaps the later layer's all-reduce
            gradient, leaves = _tie(gradient, leaves)
        return jax.tree.unflatten(self.structure, leaves)(gradient)


def _compute(layer: LayerOf, state: Carry, whole: Any) -> tuple[Carry, None]:
    return layer(state, whole), None


def _pull_back(layer: LayerOf, state: Carry, whole: Any, *, trained: Callable) -> tuple[Carry, _Kept]:
    arrays, tree = jax.tree.flatten(whole)
    mine = trained(whole)
    where = [next(n for n, array in enumerate(arrays) if array is one) for one in mine]

    def of_trained(state, mine):
        given = dict(zip(where, mine))
        return layer(state, tree.unflatten([given.get(n, array) for n, array in enumerate(arrays)]))

    state, pullback = jax.vjp(of_trained, state, mine)
    leaves, structure = jax.tree.flatten(pullback)
    places = tuple((n, m) for n, leaf in enumerate(leaves) for m, array in enumerate(arrays) if leaf is array)
    for place, _ in places:
        leaves[place] = None
    return state, _Kept(leaves, structure, places)


def _tie(carry: Carry, others: Any) -> tuple[Carry, Any]:
    """Barrier: `others` cannot start before the state's newest array (or its gradient), which no collective makes."""
    state, extra = carry
    newest = "residual" if state.partial is None else "partial"
    here, others = lax.optimization_barrier((getattr(state, newest), others))
    return (dataclasses.replace(state, **{newest: here}), extra), others
