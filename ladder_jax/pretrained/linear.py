"""Convert between PyTorch's matrices, [out, in], and our arrays, in which heads are separate dimensions.

The functions return views and copy no values. `dims` are letters as in `source.dims`; `ours` is our shape.
"""

import math

import numpy as np

from ladder_jax.nn import parameter


def shape(dims: str, ours: tuple[int, ...]) -> tuple[int, ...]:
    """PyTorch's shape: [N x H, D] for our [D, N, H]. Vectors are flat. Tables are [V, D] in both."""
    if not parameter.is_matrix(dims):
        return (math.prod(ours),)
    if dims == "VD":
        return ours
    inputs = 1 if dims.startswith("D") else len(dims) - 1  # the dimensions that a matmul sums over come first
    return (math.prod(ours[inputs:]), math.prod(ours[:inputs]))


def to_ours(array: np.ndarray, *, dims: str, ours: tuple[int, ...]) -> np.ndarray:
    """Reshape from PyTorch's `shape(dims, ours)` to `ours`."""
    return array if dims == "VD" else array.T.reshape(ours)


def from_ours(array: np.ndarray, *, dims: str) -> np.ndarray:
    """Reshape from our layout to PyTorch's `shape(dims, array.shape)`."""
    theirs = shape(dims, array.shape)
    return array if dims == "VD" else array.reshape(theirs[::-1]).T
