"""Matrices as PyTorch stores them, [out, in], against ours, whose heads are dimensions of their own.

Both functions only turn a view: no value is copied until it is used. `dims` are letters as in `source.dims`.
"""

import math

import numpy as np

from ladder_jax.nn import parameter


def shape(dims: str, ours: tuple[int, ...]) -> tuple[int, ...]:
    """The shape there of what is [D, N, H], say, here: [N x H, D]. Vectors are flat; tables [V, D] on both sides."""
    if not parameter.is_matrix(dims):
        return (math.prod(ours),)
    if dims == "VD":
        return ours
    inputs = 1 if dims.startswith("D") else len(dims) - 1  # the dimensions that a matmul sums over come first
    return (math.prod(ours[inputs:]), math.prod(ours[:inputs]))


def to_ours(array: np.ndarray, *, dims: str, ours: tuple[int, ...]) -> np.ndarray:
    """From `shape(dims, ours)` to `ours`."""
    return array if dims == "VD" else array.T.reshape(ours)


def from_ours(array: np.ndarray, *, dims: str) -> np.ndarray:
    """From ours to `shape(dims, array.shape)`."""
    there = shape(dims, array.shape)
    return array if dims == "VD" else array.reshape(there[::-1]).T
