"""Attention kernels: the choice for a device, and one signature for all of them."""

import enum
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ladder_jax.config import Dtype, ModelConfig
from ladder_jax.parallel.collectives import differentiable, pvary, unchecked, varying
from ladder_jax.parallel.compiled import is_v5e

BLOCK = 512  # cached positions whose scores `extend` holds at once
PAGE = 128  # positions that a paged cache is read by, and a divisor of its heads' size: whole tiles in every dtype


class Kernel(enum.Enum):
    XLA = "xla"  # everywhere; scores in memory
    CUDNN = "cudnn"  # flash attention on NVIDIA GPUs
    SPLASH = "splash"  # flash attention on TPUs, for whole blocks; a decode step's one query uses XLA
    PAGED = "paged"  # for blocks as splash; a decode step reads the cache up to each row's length, and no more

    @property
    def cache_dims(self) -> str:
        """The order in which a cache is kept: B rows, S positions, N key/value heads, H head size."""
        return "BNSH" if self is Kernel.PAGED else "BSNH"

    @property
    def page(self) -> int:
        """A cache's capacity is a multiple of it."""
        return PAGE if self is Kernel.PAGED else 1


def choose(config: ModelConfig, *, mesh: Mesh) -> Kernel:
    """The kernel for the mesh's devices (which need not be this machine's: ahead-of-time compilation)."""
    device = mesh.devices.flat[0]
    low_precision = config.dtype is Dtype.BFLOAT16
    if device.platform == "tpu":
        # v5e: 13 % more estimated cycles with it, where the reductions need the same vector memory.
        paged = low_precision and config.head_dim % PAGE == 0 and not is_v5e(device.device_kind)
        return Kernel.PAGED if paged else Kernel.SPLASH
    if device.platform in ("gpu", "cuda") and low_precision and config.head_dim % 8 == 0:
        # cuDNN asks the driver while it is traced, so it needs a GPU on this very machine.
        if config.head_dim <= 128 and device in jax.devices():
            return Kernel.CUDNN
    return Kernel.XLA


def causal(
    query: jax.Array, key: jax.Array, value: jax.Array, *, kernel: Kernel, segments: jax.Array | None = None
) -> jax.Array:
    """Attention of a block to itself, each position to those before it and itself.

    query [B, T, N, H], key and value [B, T, K, H] with K dividing N; the result is as query.
    segments: [B, T] integers; a position sees only those of its own number. None: all are of one.
    """
    if kernel in (Kernel.SPLASH, Kernel.PAGED):
        from ladder_jax.nn import tpu_attention  # Pallas is for TPUs only, and slow to import

        return tpu_attention.causal(query, key, value, segments=segments)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=kernel.value)
    call = differentiable(attend) if kernel is Kernel.CUDNN else attend
    if segments is None:
        return call(query, key, value)
    # jax keeps cuDNN's own packed layout private. A mask costs it [B, 1, T, T] in memory, of the compute dtype, and
    # its gradient is for even lengths.
    same = (segments[:, :, None] == segments[:, None, :])[:, None]
    if kernel is Kernel.XLA or query.shape[1] % 2:
        return jax.nn.dot_product_attention(query, key, value, mask=same, is_causal=True, implementation="xla")

    def masked(query, key, value, mask):
        return attend(query, key, value, mask=mask)

    return differentiable(masked, fixed=1)(query, key, value, same)


def extend(query: jax.Array, key: jax.Array, value: jax.Array, start: jax.Array, *, kernel: Kernel) -> jax.Array:
    """Attention of a block at positions start..start+T-1 to a cache that holds it and all before it.

    query [B, T, N, H], the cache's key and value [B, S, K, H] (in the kernel's order) with K dividing N, start an
    int32 scalar; query t sees the positions up to start + t. The result is as query. Not differentiable.
    """
    if kernel in (Kernel.SPLASH, Kernel.PAGED):
        from ladder_jax.nn import tpu_attention

        def heads_first(x):
            return x if kernel.cache_dims == "BNSH" else x.swapaxes(1, 2)

        return tpu_attention.extend(query, heads_first(key), heads_first(value), start)
    # cuDNN's causal mask begins at the cache's first position, and jax rounds the log-sum-exp by which two calls'
    # results could be joined to bfloat16; a bias could mask, but makes cuDNN read the cache's unused end too.
    return _blockwise(query, key, value, start)


def _blockwise(query, key, value, start):
    """`extend` by an online softmax (arXiv 1805.02867): scores of BLOCK positions at a time, [B, K, N/K, T, BLOCK]."""
    rows, length, heads, head_dim = query.shape
    _, capacity, kv_heads, _ = key.shape
    block = min(BLOCK, capacity)
    positions = start + jnp.arange(length)
    grouped = query.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)  # heads that share keys in a row
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def turn(index, carry):
        total, weighed, highest = carry
        # The last block ends where the cache does, and leaves out what the one before it has seen.
        first = jnp.minimum(index * block, capacity - block)
        keys, values = (jax.lax.dynamic_slice_in_dim(x, first, block, axis=1) for x in (key, value))
        columns = first + jnp.arange(block)
        seen = (columns[None, :] <= positions[:, None]) & (columns >= index * block)[None, :]
        scores = dot("BTKGH,BSKH->BKGTS", grouped, keys) * head_dim**-0.5
        scores = jnp.where(seen[None, None, None], scores, -jnp.inf)
        # Finite from the first block on, as every query sees position 0.
        top = jnp.maximum(highest, scores.max(-1))
        weights = jnp.exp(scores - top[..., None])
        kept = jnp.exp(highest - top)
        values = dot("BKGTS,BSKH->BKGTH", weights.astype(value.dtype), values)
        return total * kept + weights.sum(-1), weighed * kept[..., None] + values, top

    axes = varying(query) | varying(key) | varying(value)
    shape = (rows, kv_heads, heads // kv_heads, length)

    def empty(fill, *more):
        return pvary(jnp.full((*shape, *more), fill, jnp.float32), axes)

    # Blocks beyond the last query are not even visited: half of the work, from a long prompt's first token to its
    # last. The price is a loop that XLA cannot count: a GPU's host asks after every turn whether there is another.
    blocks = (start + length + block - 1) // block
    total, weighed, _ = jax.lax.fori_loop(0, blocks, turn, (empty(0.0), empty(0.0, head_dim), empty(-jnp.inf)))
    attended = (weighed / total[..., None]).astype(query.dtype)
    return jnp.moveaxis(attended, 3, 1).reshape(query.shape)


def decode(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, *, kernel: Kernel) -> jax.Array:
    """Attention of one position a row (query [B, 1, N, H]) to the first `lengths` [B] of the cache.

    Its key and value are [B, S, K, H], in the kernel's order.
    """
    if kernel is Kernel.PAGED:
        from ladder_jax.nn import tpu_attention

        return tpu_attention.decode(query, key, value, lengths.astype(jnp.int32), page=PAGE)
    implementation = "xla" if kernel is Kernel.SPLASH else kernel.value

    def attend(query, key, value, lengths):
        return jax.nn.dot_product_attention(
            query, key, value, key_value_seq_lengths=lengths, implementation=implementation
        )

    call = unchecked(attend) if kernel is Kernel.CUDNN else attend
    return call(query, key, value, lengths.astype(jnp.int32))


def cached(block: jax.Array, *, kernel: Kernel) -> jax.Array:
    """Keys or values [B, T, K, H] in the order of the kernel's cache."""
    return block.swapaxes(1, 2) if kernel.cache_dims == "BNSH" else block
