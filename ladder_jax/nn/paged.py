"""Attention of one position a row on TPUs: the paged kernel that jax keeps. It reads a row's cache up to its length.

A page is a part of one head's positions, and the cache lies in memory heads first: what is read together lies
together. A row has as many pages as its capacity needs, one after the other, and each (row, key/value head) is a
sequence of the kernel's, so that any number of heads is the case of one.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

from ladder_jax.nn.unchecked import unchecked

BLOCK = 512  # positions that the kernel reads at once, while it computes the ones before


def decode(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, *, page: int) -> jax.Array:
    """Attention of query [B, 1, N, H] to the first `lengths` [B] int32 (at least 1) of key and value [B, K, S, H].

    K divides N, and S is a multiple of `page`, the number of positions in one page. The kernel computes with bfloat16
    keys and values. The result is as query. Not differentiable.
    """
    rows, kv_heads, capacity, head_dim = key.shape
    group, count = query.shape[2] // kv_heads, capacity // page
    sequences = rows * kv_heads

    def attend(query, key, value, lengths):
        pages = lambda x: x.reshape(1, sequences * count, page, head_dim)
        attended = paged_attention(
            # In float32, as the kernel adds its blocks up in the query's dtype.
            query.reshape(sequences, group, head_dim).astype(jnp.float32) * head_dim**-0.5,
            pages(key),
            pages(value),
            jnp.repeat(lengths, kv_heads),
            jnp.arange(sequences * count, dtype=jnp.int32).reshape(sequences, count),
            pages_per_compute_block=math.gcd(count, BLOCK // page),
        )
        return attended.reshape(query.shape).astype(query.dtype)

    return unchecked(attend)(query, key, value, lengths)
