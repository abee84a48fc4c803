"""What the backward pass of a layer recomputes, without an all-reduce and without waiting for one."""

import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.config import Loop, Remat
from ladder_jax.residual.steps import REDUCED, Step

LAYER_INPUT = "entered"
"""The checkpoint name of the state that enters a layer."""


def rematerialised(body: Callable, *, steps: tuple[Step, ...], remat: Remat, loop: Loop) -> Callable:
    """`body(..., steps)` as a function of (state, parameters, cache) whose backward pass recomputes what `remat` says.

    Every policy keeps the reduced sums, so that nothing is all-reduced twice.
    """
    body = functools.partial(body, steps=steps)
    policies = jax.checkpoint_policies
    if remat is Remat.NONE:
        return body
    policy = policies.save_only_these_names(REDUCED)
    if remat is Remat.SAVE_MATMULS:
        policy = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, policy)
    elif remat is Remat.OFFLOAD:
        body = _with_named_input(body)
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT, REDUCED],
            offload_src="device",
            offload_dst="pinned_host",
        )
    body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return body if loop is Loop.SCAN else _prevent_cse(body)


def _with_named_input(body: Callable) -> Callable:
    """`body` with a name on the state that enters it: a policy offloads by name, and leaves the rest on the device."""

    def named(state, params, cache):
        return body(jax.tree.map(lambda a: checkpoint_name(a, LAYER_INPUT), state), params, cache)

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
        newest = state.residual if state.partial is None else state.partial
        pullback, _ = jax.lax.optimization_barrier((pullback, newest))
        return pullback(gradients)

    apart.defvjp(functools.partial(jax.vjp, body), backward)
    return apart
