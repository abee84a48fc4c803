"""The loop over layers: unrolled, or a `lax.scan` over every run of layers that do the same."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.config import Loop, Remat
from ladder_jax.nn import prefetch
from ladder_jax.parallel.collectives import pvary, varying
from ladder_jax.parallel.fsdp import FsdpLayer
from ladder_jax.residual import REDUCED, State, Step

ENTERED = "entered"
"""The checkpoint name of the state that enters a layer."""

MAX_PERIOD = 4  # layers in one scan body; a longer pattern (desync-9, say) costs its compile time

# (state, one layer's parameters, its cache, its steps) -> (state, cache)
Body = Callable[[State, Any, Any, tuple[Step, ...]], tuple[State, Any]]


def run(
    body: Body,
    state: State,
    *,
    params: Any,
    caches: Any,
    steps: tuple[tuple[Step, ...], ...],
    loop: Loop,
    remat: Remat,
    axes: tuple[str, ...],
    dtype: jnp.dtype,
    fsdp_layer: FsdpLayer | None = None,
    first: int = 0,
) -> tuple[State, Any]:
    """The state after all layers, and the caches in the form in which they came.

    params: stacked [L, ...], or (unrolled only) a tuple with each layer's own arrays.
    caches: likewise, or None.
    dtype: of a sublayer's output.
    fsdp_layer: how a layer's parameters are made of a rank's shares, where they are split over the fsdp axis.
    first: the number of the first of these layers in the model, for their names in the program.
    """
    if fsdp_layer is not None and caches is None:
        return _run_ahead(
            body, state, params, steps, loop, remat, fsdp_layer, axes=axes, dtype=dtype, first=first
        ), None
    if fsdp_layer is not None:
        of_whole, body = (
            body,
            lambda state, layer, cache, steps: of_whole(state, fsdp_layer.gather(layer), cache, steps),
        )
    form = type(caches)
    if loop is Loop.UNROLLED:
        runs = [(layer, 1, 1) for layer in range(len(steps))]
        params, caches = _split(params), _split(caches)
    else:
        runs = runs_of(steps)
    updated = []
    for start, period, repeats in runs:
        stop = start + period * repeats
        if repeats == 1:
            for layer in range(start, stop):
                step_body = remat_body(body, steps=steps[layer], remat=remat, loop=Loop.UNROLLED)
                with jax.named_scope(f"layer_{first + layer}"):  # which the schedule's report reads
                    state, cache = step_body(state, _layer(params, layer), _layer(caches, layer))
                updated.append(cache)
            continue

        def turn(state, slices, kinds=steps[start : start + period]):
            these, below = slices, []
            for index, kind in enumerate(kinds):
                step_body = remat_body(body, steps=kind, remat=remat, loop=Loop.SCAN)
                state, cache = step_body(state, *(_layer(tree, index) for tree in these))
                below.append(cache)
            return state, _stack(below)

        fold = lambda a: a[start:stop].reshape(repeats, period, *a.shape[1:])
        state = steps[start][0].fill(state, axes=axes, dtype=dtype)
        with jax.named_scope(f"layers_{first + start}_to_{first + stop - 1}"):
            state, below = jax.lax.scan(turn, state, jax.tree.map(fold, (params, caches)))
        below = jax.tree.map(lambda a: a.reshape(period * repeats, *a.shape[2:]), below)
        updated.extend(_layer(below, index) for index in range(period * repeats)) if len(runs) > 1 else None
    if caches is None:
        return state, None
    if form is tuple:
        return state, tuple(updated)
    return state, (below if len(runs) == 1 else _stack(updated))


def runs_of(steps: tuple[tuple[Step, ...], ...]) -> list[tuple[int, int, int]]:
    """(start, period, repeats) of runs of layers: greedily the longest, then the shortest period."""
    runs, start = [], 0
    while start < len(steps):
        best = (1, 1)
        for period in range(1, MAX_PERIOD + 1):
            repeats, pattern = 1, steps[start : start + period]
            while steps[start + repeats * period : start + (repeats + 1) * period] == pattern:
                repeats += 1
            if repeats > 1 and repeats * period > best[0] * best[1]:
                best = (period, repeats)
        runs.append((start, *best))
        start += best[0] * best[1]
    return runs


def _run_ahead(body, state, params, steps, loop, remat, fsdp_layer, *, axes, dtype, first) -> State:
    """`run` where each layer's parameters are gathered one layer ahead."""

    def layer(kind):
        # As in a scan: what keeps a recomputation apart is the loop's own.
        of_layer = remat_body(body, steps=kind, remat=remat, loop=Loop.SCAN)
        return lambda state, whole: of_layer(state, whole, None)[0]

    whole_loop = [(0, len(steps), 1)]
    for start, period, repeats in whole_loop if loop is Loop.UNROLLED else runs_of(steps):
        stop = start + period * repeats
        if repeats == 1:
            scopes, arrays = [f"layer_{first + n}" for n in range(start, stop)], _split(params)[start:stop]
        else:
            scopes, arrays = (
                [f"layers_{first + start}_to_{first + stop - 1}"] * period,
                jax.tree.map(lambda a: a[start:stop], params),
            )
            state = steps[start][0].fill(state, axes=axes, dtype=dtype)
        layers = [layer(kind) for kind in steps[start : start + period]]
        state = prefetch.Run(layers, scopes, repeats, fsdp_layer, recomputes=remat is not Remat.NONE)(state, arrays)
    return state


def remat_body(body: Body, *, steps: tuple[Step, ...], remat: Remat, loop: Loop) -> Callable:
    """`body` of a layer with those steps, its intermediate values recomputed in the backward pass."""
    body = functools.partial(body, steps=steps)
    policies = jax.checkpoint_policies
    if remat is Remat.NONE:
        return body
    policy = policies.save_only_these_names(REDUCED)
    if remat is Remat.SAVE_MATMULS:
        policy = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, policy)
    elif remat is Remat.OFFLOAD:
        body = _named(body)
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[ENTERED, REDUCED],
            offload_src="device",
            offload_dst="pinned_host",
        )
    body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return body if loop is Loop.SCAN else _prevent_cse(body)


def _named(body: Callable) -> Callable:
    """`body`, for a policy that says where the state that enters it is kept: jax would keep it where it is."""

    def named(state, params, cache):
        return body(jax.tree.map(lambda a: checkpoint_name(a, ENTERED), state), params, cache)

    return named


def _prevent_cse(body: Callable) -> Callable:
    """`body`, whose recomputation the compiler cannot merge with the forward pass: see jax's `prevent_cse`.

    jax's barrier waits for all cotangents, including the one being all-reduced. Ours waits for `partial`'s only, so
    that recomputation overlaps that all-reduce.
    """

    @jax.custom_vjp
    def apart(state, params, cache):
        return body(state, params, cache)

    def backward(pullback, gradients):
        state, _ = gradients
        here = state.residual if state.partial is None else state.partial
        pullback, _ = jax.lax.optimization_barrier((pullback, here))
        return pullback(gradients)

    apart.defvjp(functools.partial(jax.vjp, body), backward)
    return apart


def _split(tree: Any) -> Any:
    if isinstance(tree, tuple) or tree is None:
        return tree
    return _unstack(tree)


@jax.custom_vjp
def _unstack(tree: Any) -> tuple:
    """Each layer's own arrays. The gradients are written into the stack in place, one by one, where the
    transpose of indexing sums as many arrays as there are layers, each as large as the stack."""
    count = jax.tree.leaves(tree)[0].shape[0]
    return tuple(jax.tree.map(lambda a: a[i], tree) for i in range(count))


def _restack(_, gradients: tuple) -> tuple:
    def write(*layers):
        axes = frozenset.union(*map(varying, layers))
        stack = pvary(jnp.zeros((len(layers), *layers[0].shape), layers[0].dtype), axes)
        for index in reversed(range(len(layers))):
            stack = jax.lax.dynamic_update_index_in_dim(stack, layers[index], index, 0)
        return stack

    return (jax.tree.map(write, *gradients),)


_unstack.defvjp(lambda tree: (_unstack(tree), None), _restack)


def _layer(tree: Any, index: int) -> Any:
    return tree[index] if isinstance(tree, tuple) else jax.tree.map(lambda a: a[index], tree)


def _stack(trees: list) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
