"""Rotary position embedding (https://arxiv.org/abs/2104.09864), in rotate-half form."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ladder_jax.config import ModelConfig, RopeScaling


def frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position, [H/2], in float64."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    plain = config.rope_theta**-exponents
    return plain if config.rope_scaling is None else _llama3(plain, config.rope_scaling)


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3's stretch (arXiv 2407.21783): slow rotations by `factor`, fast ones not, a ramp between."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def tables(positions: jax.Array, *, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, T, H/2], float32, for `positions` [B, T]; made once for all layers."""
    angles = positions[:, :, None].astype(jnp.float32) * jnp.asarray(frequencies(config)[None, None, :], jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [B, T, heads, H] turned by its positions' angles: dimension i pairs with i + H/2."""
    cos, sin = (part[:, :, None, :] for part in table)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)
