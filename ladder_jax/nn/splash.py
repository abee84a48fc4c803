"""Flash attention on TPUs: jax's splash kernel, callable under `check_vma=True`."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import PartitionSpec

from ladder_jax.parallel.collectives import vary, varying

LANES = 128  # the kernel's blocks of positions are multiples of it
MAX_BLOCK = 512  # large enough to keep the matrix unit busy, small enough for every TPU's VMEM


def causal(query: jax.Array, key: jax.Array, value: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Attention of a block to itself, each position to those before it and itself.

    query [B, T, N, H], key and value [B, T, K, H] with K dividing N; the result is as query.
    interpret: run the kernel without a TPU, slowly, to test its values.
    """
    axes = tuple(varying(query) | varying(key) | varying(value))
    length, head_dim = query.shape[1], query.shape[3]
    # Padding is on the right, where causal attention does not look.
    padding = ((0, 0), (0, 0), (0, -length % LANES), (0, 0))
    args = [jnp.pad(vary(x, axes).swapaxes(1, 2), padding) for x in (query * head_dim**-0.5, key, value)]
    return _attend(*args, interpret)[:, :, :length].swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(query: jax.Array, key: jax.Array, value: jax.Array, interpret: bool) -> jax.Array:
    """query [B, N, T, H], scaled; key and value [B, K, T, H]; all vary over the same axes."""
    return _unchecked(_kernel(query.shape, interpret))(query, key, value)


def _forward(query: jax.Array, key: jax.Array, value: jax.Array, interpret: bool):
    return _unchecked(functools.partial(jax.vjp, _kernel(query.shape, interpret)))(query, key, value)


def _backward(interpret: bool, pull_back: Callable, gradient: jax.Array):
    return _unchecked(lambda gradient, pull_back: pull_back(gradient))(gradient, pull_back)


_attend.defvjp(_forward, _backward)


def _unchecked(function: Callable) -> Callable:
    """`function` with arguments that have no varying types, and results typed as the first argument.

    Pallas kernels do not know these types, so they run in a `shard_map` that does not check them and
    has no axis left to split. jax cannot type a gradient through it either, hence `_attend`.
    """

    def untyped(x):
        # The type comes in with the argument, and goes with any operation, of which this one is free.
        return lax.squeeze(lax.expand_dims(x, (0,)), (0,))

    local = jax.shard_map(
        lambda *args: function(*jax.tree.map(untyped, args)),
        axis_names=set(),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return lambda *args: jax.tree.map(lambda x: vary(x, tuple(varying(args[0]))), local(*args))


def _kernel(shape: tuple[int, ...], interpret: bool) -> Callable:
    """Attention for a query of this shape: [B, N, T, H], T a multiple of LANES."""
    _, heads, length, _ = shape
    mask = _mask(heads, length)
    block = math.gcd(length, MAX_BLOCK)
    sizes = splash_attention.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )

    def attend(query, key, value):
        # Made here because it holds arrays, which belong to the trace that they are made in.
        make = splash_attention.make_splash_mha_single_device
        return jax.vmap(make(mask=mask, block_sizes=sizes, interpret=interpret))(query, key, value)

    return attend


@functools.cache
def _mask(heads: int, length: int) -> splash_attention.MultiHeadMask:
    """Cached because jax traces the kernel once for every mask object."""
    return splash_attention.MultiHeadMask([splash_attention.CausalMask((length, length))] * heads)
