"""Run a function of one rank's arrays on every rank: over a mesh, or emulated on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ladder_jax.parallel.collectives import EMULATED
from ladder_jax.parallel.mesh import Layout

SHARDED = "NJFGVK"  # the dimensions that tensor parallelism splits
Dims = Any  # a pytree prefix of strings such as "BTV"


def on_mesh(fn: Callable, *, layout: Layout, in_dims: Dims, out_dims: Dims) -> Callable:
    """`jax.shard_map` over the whole mesh, fully manual and type-checked, by dimension names.

    `fn` sees one rank's shards. Only an emulation is not type-checked: jax has no varying types for
    the collectives of a `vmap`.
    """
    specs = lambda dims: jax.tree.map(layout.spec, dims)
    return jax.shard_map(
        fn,
        mesh=layout.mesh,
        in_specs=specs(in_dims),
        out_specs=specs(out_dims),
        check_vma=not layout.emulated,
    )


def over_ranks(fn: Callable, *, layout: Layout, in_dims: tuple, out_dims: Dims) -> Callable:
    """`fn` itself on a real tensor axis; where the ranks are emulated, all of them on this device.

    The emulation splits each argument along its tensor-parallel dimension, computes every rank
    under one named axis, over which the collectives work as on a mesh, and joins the results.
    It must stand inside `jax.grad`: only then is a gradient that of the whole function.
    """
    if not layout.emulated:
        return fn

    def emulated(*args):
        pairs = [_align(dims, arg) for dims, arg in zip(in_dims, args, strict=True)]
        split = [jax.tree.map(lambda d, a: _split(a, d, layout.ranks), *pair) for pair in pairs]
        axes = [jax.tree.map(lambda d: 0 if _position(d) is not None else None, dims) for dims, _ in pairs]
        out_axes = jax.tree.map(lambda d: 0 if _position(d) is not None else None, out_dims)
        named = dict(axis_name=EMULATED, axis_size=layout.ranks)  # the size, as no argument may be split
        out = jax.vmap(fn, in_axes=tuple(axes), out_axes=out_axes, **named)(*split)
        dims, out = _align(out_dims, out)
        return jax.tree.map(lambda d, a: _join(a, d), dims, out)

    return emulated


def _align(dims: Dims, tree: Any) -> tuple[Any, Any]:
    """`dims`, a prefix of `tree`, spread to every leaf."""
    spread = jax.tree.map(lambda d, below: jax.tree.map(lambda _: d, below), dims, tree)
    return spread, tree


def _position(dims: str) -> int | None:
    found = [index for index, dim in enumerate(dims) if dim in SHARDED]
    return found[0] if found else None


def _split(array: jax.Array, dims: str, ranks: int) -> jax.Array:
    position = _position(dims)
    if position is None:
        return array
    if dims[position] == "K" and array.shape[position] < ranks:  # several ranks share a head
        array = jnp.repeat(array, ranks // array.shape[position], axis=position)
    shape = array.shape
    array = array.reshape(*shape[:position], ranks, shape[position] // ranks, *shape[position + 1 :])
    return jnp.moveaxis(array, position, 0)


def _join(array: jax.Array, dims: str) -> jax.Array:
    position = _position(dims)
    if position is None:
        return array
    array = jnp.moveaxis(array, 0, position)
    return array.reshape(*array.shape[:position], -1, *array.shape[position + 2 :])
