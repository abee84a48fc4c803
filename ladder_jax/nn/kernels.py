"""Attention kernels: which one a device has, and one signature for all of them."""

import enum
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ladder_jax.config import Dtype, ModelConfig
from ladder_jax.nn.unchecked import differentiable, unchecked


class Kernel(enum.Enum):
    XLA = "xla"  # everywhere; scores in memory
    CUDNN = "cudnn"  # flash attention on NVIDIA GPUs
    SPLASH = "splash"  # flash attention on TPUs, for whole blocks; a decode step's one query uses XLA


def choose(config: ModelConfig, *, mesh: Mesh) -> Kernel:
    """The kernel for the mesh's devices (which need not be this machine's: ahead-of-time compilation)."""
    device = mesh.devices.flat[0]
    if device.platform == "tpu":
        return Kernel.SPLASH
    low_precision = config.dtype is Dtype.BFLOAT16
    if device.platform in ("gpu", "cuda") and low_precision and config.head_dim % 8 == 0:
        # cuDNN asks the driver while it is traced, so it needs a GPU on this very machine.
        if config.head_dim <= 128 and device in jax.devices():
            return Kernel.CUDNN
    return Kernel.XLA


def causal(query: jax.Array, key: jax.Array, value: jax.Array, *, kernel: Kernel) -> jax.Array:
    """Attention of a block to itself, each position to those before it and itself.

    query [B, T, N, H], key and value [B, T, K, H] with K dividing N; the result is as query.
    """
    if kernel is Kernel.SPLASH:
        from ladder_jax.nn import splash  # Pallas is for TPUs only, and slow to import

        return splash.causal(query, key, value)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=kernel.value)
    return (differentiable(attend) if kernel is Kernel.CUDNN else attend)(query, key, value)


def decode(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, *, kernel: Kernel) -> jax.Array:
    """Attention of one position a row (query [B, 1, N, H]) to the first `lengths` [B] of the cache [B, S, K, H]."""
    implementation = "xla" if kernel is Kernel.SPLASH else kernel.value

    def attend(query, key, value, lengths):
        return jax.nn.dot_product_attention(
            query, key, value, key_value_seq_lengths=lengths, implementation=implementation
        )

    call = unchecked(attend) if kernel is Kernel.CUDNN else attend
    return call(query, key, value, lengths.astype(jnp.int32))
