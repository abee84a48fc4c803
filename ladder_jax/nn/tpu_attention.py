"""Attention on TPUs: the splash (flash) kernel for blocks, and the paged one for one position a
row. jax keeps both.

The paged kernel reads a row's cache up to its length. A page is a part of one head's positions, and
the cache lies in memory heads first: what is read together lies together. A row has as many pages
as its capacity needs, one after the other, and each (row, key/value head) is a sequence of the
kernel's, so that any number of heads is the case of one.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    DEFAULT_MASK_VALUE,
    SplashAttentionKernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from ladder_jax.nn.parameter import pad_end
from ladder_jax.parallel.collectives import differentiable, unchecked

LANES = 128  # the kernel's blocks of positions are multiples of it
MAX_BLOCK = 512  # large enough to keep the matrix unit busy, small enough for every TPU's VMEM


def causal(
    query: Array,
    key: Array,
    value: Array,
    *,
    segments: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Attention of a block to itself, each position to those before it and itself.

    query [B, T, N, H], key and value [B, T, K, H] with K dividing N; the result is as query.
    segments: [B, T] integers; a position sees only those of its own number. None: all are of one.
    interpret: run the kernel without a TPU, slowly, to test its values.
    """
    length = query.shape[1]
    head_dim = query.shape[3]
    padding = -length % LANES  # on the right, where causal attention does not look
    scaled = query * head_dim**-0.5
    args = [pad_end(x.swapaxes(1, 2), axis=2, by=padding) for x in (scaled, key, value)]
    kernel = _kernel(args[0].shape, interpret)
    if segments is None:
        attended = differentiable(kernel)(*args)
    else:
        numbers = pad_end(segments.astype(jnp.int32), axis=1, by=padding)
        attended = differentiable(kernel, fixed=1)(*args, numbers)
    return attended[:, :, :length].swapaxes(1, 2)


def _kernel(shape, interpret):
    """Attention for a query of this shape, [B, N, T, H], T a multiple of LANES; a fourth argument
    is the segments.
    """
    _, heads, length, _ = shape
    mask = _mask(heads, length)
    block = math.gcd(length, MAX_BLOCK)
    sizes = splash_attention.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )

    def attend(query, key, value, segments=None):
        # Made here because it holds arrays, which belong to the trace that they are made in.
        make = splash_attention.make_splash_mha_single_device
        kernel = make(mask=mask, block_sizes=sizes, interpret=interpret)
        if segments is None:
            return jax.vmap(kernel)(query, key, value)
        both = splash_attention.SegmentIds(q=segments, kv=segments)
        return jax.vmap(kernel)(query, key, value, both)

    return attend


@functools.cache
def _mask(heads, length):
    """Cached because jax traces the kernel once for every mask object."""
    return splash_attention.MultiHeadMask([splash_attention.CausalMask((length, length))] * heads)


def extend(
    query: Array, key: Array, value: Array, start: Array, *, interpret: bool = False
) -> Array:
    """Attention of a block at positions start..start+T-1 to a cache that holds it and all before
    it.

    query [B, T, N, H], the cache's key and value [B, K, S, H] with K dividing N, start an int32
    scalar; query t sees the positions up to start + t. The result is as query. Not differentiable.
    """
    length = query.shape[1]
    head_dim = query.shape[3]
    query, block_q = _in_blocks(query.swapaxes(1, 2) * head_dim**-0.5)
    key, block_kv = _in_blocks(key)
    value, _ = _in_blocks(value)

    def attend(query, key, value, start):
        # The kernel's makers know masks that are fixed when it is compiled, and whole boolean ones.
        # What they make
        # of a mask is this: the blocks of keys that each block of queries visits, and the queries'
        # positions.
        first = start + jnp.arange(0, query.shape[2], block_q)
        blocks = jnp.arange(key.shape[2] // block_kv)
        visited = blocks[None] * block_kv < (first + block_q)[:, None]
        mask = MaskInfo(
            # after its last block, the next queries' first
            data_next=jnp.where(visited, blocks[None], 0)[None],
            mask_next=None,
            block_mask=visited.astype(jnp.int32)[None],
            partial_mask_blocks=None,
            q_sequence=start + jnp.arange(query.shape[2]),
        )
        kernel = SplashAttentionKernel(
            mask,
            None,  # no gradient
            None,
            is_mqa=False,
            block_sizes=splash_attention.BlockSizes(block_q=block_q, block_kv=block_kv),
            save_residuals=False,
            mask_value=DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None,
            residual_checkpoint_name=None,
            mask_function=_not_after,
            interpret=interpret,
        )
        return jax.vmap(kernel)(query, key, value)

    return unchecked(attend)(query, key, value, start)[:, :, :length].swapaxes(1, 2)


def _in_blocks(x):
    """x [B, heads, T, H], T padded to a multiple of the block, which is returned too."""
    length = x.shape[2]
    block = min(MAX_BLOCK, length + -length % LANES)
    return pad_end(x, axis=2, by=-length % block), block


def _not_after(query_positions, key_positions):
    return query_positions >= key_positions


DECODE_BLOCK = 512  # positions that the kernel reads at once, while it computes the ones before


def decode(query: Array, key: Array, value: Array, lengths: Array, *, page: int) -> Array:
    """Attention of query [B, 1, N, H] to the first `lengths` [B] int32 (at least 1) of key and
    value [B, K, S, H].

    K divides N, and S is a multiple of `page`, the number of positions in one page. The kernel
    computes with bfloat16 keys and values. The result is as query. Not differentiable.
    """
    rows, kv_heads, capacity, head_dim = key.shape
    group = query.shape[2] // kv_heads
    count = capacity // page
    sequences = rows * kv_heads

    def attend(query, key, value, lengths):
        def pages(x):
            return x.reshape(1, sequences * count, page, head_dim)

        attended = paged_attention(
            # In float32, as the kernel adds its blocks up in the query's dtype.
            query.reshape(sequences, group, head_dim).astype(jnp.float32) * head_dim**-0.5,
            pages(key),
            pages(value),
            jnp.repeat(lengths, kv_heads),
            jnp.arange(sequences * count, dtype=jnp.int32).reshape(sequences, count),
            pages_per_compute_block=math.gcd(count, DECODE_BLOCK // page),
        )
        return attended.reshape(query.shape).astype(query.dtype)

    return unchecked(attend)(query, key, value, lengths)
