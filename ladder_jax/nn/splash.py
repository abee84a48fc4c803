"""Flash attention on TPUs: the splash kernel that jax keeps."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention

from ladder_jax.nn.unchecked import differentiable

LANES = 128  # the kernel's blocks of positions are multiples of it
MAX_BLOCK = 512  # large enough to keep the matrix unit busy, small enough for every TPU's VMEM


def causal(query: jax.Array, key: jax.Array, value: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Attention of a block to itself, each position to those before it and itself.

    query [B, T, N, H], key and value [B, T, K, H] with K dividing N; the result is as query.
    interpret: run the kernel without a TPU, slowly, to test its values.
    """
    length, head_dim = query.shape[1], query.shape[3]
    # Padding is on the right, where causal attention does not look.
    padding = ((0, 0), (0, 0), (0, -length % LANES), (0, 0))
    args = [jnp.pad(x.swapaxes(1, 2), padding) for x in (query * head_dim**-0.5, key, value)]
    attend = differentiable(_kernel(args[0].shape, interpret))
    return attend(*args)[:, :, :length].swapaxes(1, 2)


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
