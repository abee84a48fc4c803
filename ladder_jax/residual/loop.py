"""The loop over layers: unrolled, or one `lax.scan` for every run of layers with equal steps; and
what its backward pass recomputes.

Through the layers go the `State`, which steps read, and `extra`: any pytree that a feature carries
along (routing statistics, another stream), which no step sees.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

from ladder_jax.config import Execution, Loop, Remat
from ladder_jax.parallel.collectives import EMULATED, Axes
from ladder_jax.residual.recurrence import REDUCED, AllReduce, State, Step

LAYER_INPUT = "entered"
"""The checkpoint name of the state that enters a layer."""
MATMUL = "matmul"
"""The checkpoint name of a matmul's result: a policy for dots does not see one that has a gradient
rule of its own.
"""
EXPERTS = "experts"
"""The checkpoint name of a router's choice, which every policy keeps: recomputed, near-equal logits
could choose another expert.
"""
EXCHANGED = "exchanged"
"""The checkpoint name of rows that came from other ranks: larger than a layer's input, so a policy
that recomputes matmuls exchanges them again.
"""

MAX_PERIOD = 4  # layers in one scan body; a longer pattern (desync-9, say) costs its compile time

# (state, extra, one layer's parameters, its cache, its steps) -> (state, extra, cache)
Body = Callable[[State, Any, Any, Any, tuple[Step, ...]], tuple[State, Any, Any]]


def run_layers(
    body: Body,
    state: State,
    extra: Any = None,
    *,
    params: Any,
    caches: Any = None,
    steps: tuple[tuple[Step, ...], ...],
    wire: AllReduce,
    execution: Execution,
    dtype: jnp.dtype,
    first: int = 0,
    keeps: Callable[..., bool] | None = None,
) -> tuple[State, Any, Any]:
    """The state and `extra` after all layers, and the caches in the form in which they came.

    params: stacked [L, ...], or (unrolled only) a tuple with each layer's own arrays.
    caches: likewise (unrolled always a tuple), or None.
    dtype: of a sublayer's output.
    first: the number of the first of these layers in the model, for their names in the program.
    keeps: with Remat.NONE, a checkpoint policy for what the backward pass does not recompute; all
        of it by default.
    """
    recomputed = functools.partial(
        rematerialised, body, remat=execution.remat, axes=wire.axes, keeps=keeps
    )
    if execution.loop is Loop.UNROLLED:
        runs = [(layer, 1, 1) for layer in range(len(steps))]
        params = params if isinstance(params, tuple) else _unstack(params)
    else:
        runs = runs_of(steps)
    updated = []
    for start, period, repeats in runs:
        if repeats == 1:
            of_layer = recomputed(steps=steps[start], loop=Loop.UNROLLED)
            with jax.named_scope(f"layer_{first + start}"):  # which the schedule's report reads
                state, extra, cache = of_layer(
                    state, extra, layer_of(params, start), layer_of(caches, start)
                )
            updated.append(_of_one(cache, like=caches))
            continue

        def turn(carry, slices, kinds=steps[start : start + period]):
            state, extra = carry
            of_turn = []
            for index, kind in enumerate(kinds):
                of_layer = recomputed(steps=kind, loop=Loop.SCAN)
                state, extra, cache = of_layer(
                    state, extra, *(layer_of(tree, index) for tree in slices)
                )
                of_turn.append(cache)
            return (state, extra), _stack(of_turn)

        count = period * repeats
        stop = start + count

        def fold(a):
            return a[start:stop].reshape(repeats, period, *a.shape[1:])

        of_turn = sum(steps[start : start + period], ())
        carry = wire.fill(state, of_turn, dtype=dtype), extra
        with jax.named_scope(f"layers_{first + start}_to_{first + stop - 1}"):
            slices = jax.tree.map(fold, (params, caches))
            (state, extra), scanned = jax.lax.scan(turn, carry, slices)
        updated.append(jax.tree.map(lambda a, count=count: a.reshape(count, *a.shape[2:]), scanned))
    return state, extra, joined(updated)


def runs_of(steps: tuple[tuple[Step, ...], ...]) -> list[tuple[int, int, int]]:
    """(start, period, repeats) of runs of layers: greedily the longest, then the shortest
    period.
    """
    runs = []
    start = 0
    while start < len(steps):
        best = (1, 1)
        for period in range(1, MAX_PERIOD + 1):
            repeats = 1
            pattern = steps[start : start + period]
            while steps[start + repeats * period : start + (repeats + 1) * period] == pattern:
                repeats += 1
            if repeats > 1 and repeats * period > best[0] * best[1]:
                best = (period, repeats)
        runs.append((start, *best))
        start += best[0] * best[1]
    return runs


def rematerialised(
    body: Callable,
    *,
    steps: tuple[Step, ...],
    remat: Remat,
    loop: Loop,
    axes: Axes,
    keeps: Callable[..., bool] | None = None,
) -> Callable:
    """`body(..., steps)` as a function of (state, extra, parameters, cache) whose backward pass
    recomputes what `remat` says.

    Every policy keeps the reduced sums, so that nothing is all-reduced twice.
    """
    body = functools.partial(body, steps=steps)
    policies = jax.checkpoint_policies
    if remat is Remat.NONE and keeps is None:
        return body
    policy = policies.save_only_these_names(REDUCED, EXPERTS)
    if remat is Remat.NONE:
        policy = keeps
    elif remat is Remat.SAVE_MATMULS:
        named = policies.save_only_these_names(REDUCED, MATMUL, EXPERTS, EXCHANGED)
        policy = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, named)
    elif remat is Remat.OFFLOAD:
        body = _with_named_input(body)
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[EXPERTS],
            names_which_can_be_offloaded=[LAYER_INPUT, REDUCED],
            offload_src="device",
            offload_dst="pinned_host",
        )
    # where jax computes a custom gradient there are no ranks, and no all-reduce to wait for
    if EMULATED in axes:
        return jax.checkpoint(body, policy=policy, prevent_cse=loop is Loop.UNROLLED)
    body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return body if loop is Loop.SCAN else _prevent_cse(body)


def _with_named_input(body):
    """`body` with a name on what enters it: a policy offloads by name, and leaves the rest on the
    device.
    """

    def named(state, extra, params, cache):
        state, extra = jax.tree.map(lambda a: checkpoint_name(a, LAYER_INPUT), (state, extra))
        return body(state, extra, params, cache)

    return named


def _prevent_cse(body):
    """`body`, whose recomputation the compiler cannot merge with the forward pass: see jax's
    `prevent_cse`.

    jax's barrier waits for all cotangents, including the one being all-reduced. Ours waits for
    `partial`'s only, so that recomputation overlaps that all-reduce.
    """

    def apart(*args):
        # Of all arrays, also those that `body` closes over (positions, masks): a gradient rule that
        # held them would outlive the trace that they are of.
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(*args)

        def function(consts, args):
            out = jaxpr_as_fun(closed.replace(consts=consts))(*jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shapes), out)

        def backward(pullback, gradients):
            state, *_ = gradients
            newest = state.residual if state.partial is None else state.partial
            pullback, _ = jax.lax.optimization_barrier((pullback, newest))
            return pullback(gradients)

        call = jax.custom_vjp(function)
        call.defvjp(functools.partial(jax.vjp, function), backward)
        return call(closed.consts, args)

    return apart


@jax.custom_vjp
def _unstack(tree):
    """A stacked tree as a tuple of each layer's own arrays.

    Backward writes each gradient into one stack, in place. The transpose of indexing would sum as
    many arrays as there are layers, each as large as the stack.
    """
    count = jax.tree.leaves(tree)[0].shape[0]
    return tuple(layer_of(tree, index) for index in range(count))


def _restack(_, gradients):
    def write(*layers):
        first = layers[0]
        stack = jnp.zeros_like(first, shape=(len(layers), *first.shape))
        for index in reversed(range(len(layers))):
            stack = jax.lax.dynamic_update_index_in_dim(stack, layers[index], index, 0)
        return stack

    return (jax.tree.map(write, *gradients),)


_unstack.defvjp(lambda tree: (_unstack.__wrapped__(tree), None), _restack)


def layer_of(tree: Any, index: int | slice) -> Any:
    """One layer's, or several layers' arrays, of stacks [L, ...] or of a tuple of each layer's
    own.
    """
    return tree[index] if isinstance(tree, tuple) else jax.tree.map(lambda a: a[index], tree)


def joined(parts: Sequence[Any]) -> Any:
    """Several layers' arrays after each other, in the form that all `parts` have: see `layer_of`."""
    if isinstance(parts[0], tuple):
        return sum(parts, ())
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


def _of_one(cache, *, like):
    """One layer's cache in the form of `like`, of several: see `layer_of`."""
    return (cache,) if isinstance(like, tuple) else jax.tree.map(lambda a: a[None], cache)


def _stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
