"""Kernels that do not support varying types, called and differentiated inside a type-checked `shard_map`."""

from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ladder_jax.parallel.collectives import pvary, varying


def unchecked(function: Callable) -> Callable:
    """`function` of arrays on arguments that it sees without varying types; not differentiable.

    Pallas and cuDNN kernels do not know these types, so they run in a `shard_map` that does not
    check them and has no axis left to split. The results vary where any argument does.
    """

    def untyped(x):
        # The type comes in with the argument, and goes with any operation, of which this one is free.
        return lax.squeeze(lax.expand_dims(x, (0,)), (0,))

    def call(*args):
        axes = frozenset.union(*(varying(x) for x in jax.tree.leaves(args)))
        local = jax.shard_map(
            lambda *inner: function(*jax.tree.map(untyped, inner)),
            axis_names=set(),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return jax.tree.map(lambda x: pvary(x, axes), local(*(jax.tree.map(lambda x: pvary(x, axes), args))))

    return call


def differentiable(kernel: Callable, *, fixed: int = 0) -> Callable:
    """`unchecked(kernel)` with the kernel's own gradient.

    fixed: how many arguments, the last ones, have no gradient; all others are of floating point.

    jax cannot type a gradient through the inner `shard_map`, so forward and backward are one each:
    the kernel's pull-back itself is the residual, and nothing is computed twice.
    """

    @jax.custom_vjp
    def call(*args):
        return unchecked(kernel)(*args)

    def forward(*args):
        def with_pull_back(*args):
            count = len(args) - fixed
            return jax.vjp(lambda *moving: kernel(*moving, *args[count:]), *args[:count])

        return unchecked(with_pull_back)(*args)

    def backward(pull_back, gradient):
        gradients = unchecked(lambda pull_back, gradient: pull_back(gradient))(pull_back, gradient)
        return *gradients, *(None,) * fixed

    call.defvjp(forward, backward)

    def typed(*args):
        axes = frozenset.union(*map(varying, args))
        return call(*(pvary(x, axes) for x in args))  # so that each gradient has its argument's type

    return typed
