"""Int8 matrices with one scale per output channel, and the matmul and lookup that take either kind
of parameter.

The model calls `einsum` and `rows` with an array or an `Int8`; `einsum` also takes an object with
its own `einsum` (retrain/lora.py).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.parallel import pvary, varying
from ladder_jax.parallel.collectives import varying_alike
from ladder_jax.residual import MATMUL

CONTRACTED = {"DNH": "D", "DKH": "D", "NHD": "NH", "DF": "D", "FD": "F", "VD": "D",
              "EDM": "D", "EMD": "M", "DW": "D", "WD": "W"}  # fmt: skip
"""The contracted dimensions of each matrix. Parameters that are not listed (gains, biases) are
never quantized.

A table's rows are summed over D by the head, and a looked-up row is a channel of its own: tied, one
serves both.
"""
LARGEST = 127  # symmetric: -128 is not used


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
    """`values` int8 times `scale` float32 is the matrix. On a rank both hold what that rank's
    channels need.

    values: as the matrix, such as [D, N/ranks, H] or [N/ranks, H, D], led by L where layers are
        stacked.
    scale: the matrix's dimensions but the contracted ones: [N/ranks, H], and [D], equal on all
        ranks.
    """

    values: Any
    scale: Any

    @classmethod
    def of(cls, array: Array, dims: str) -> "Int8":
        """The nearest multiples of each channel's largest magnitude / 127, from all of an `array`
        with these dims.

        The largest of a contraction that is split over ranks is taken over all of them, and a
        maximum
        depends on no order: every mesh gives the same bits. A channel of zeros stays one.
        """
        scale_dims = cls.dims(dims).scale
        over = tuple(index for index, dim in enumerate(dims) if dim not in scale_dims)
        array = array.astype(jnp.float32)
        largest = jnp.max(jnp.abs(array), axis=over, keepdims=True)
        # Products, not quotients by a constant or by what is broadcast: compilers may turn those into
        # either. NaNs reach the scale and stay.
        scale = largest * jnp.float32(1 / LARGEST)
        scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1, scale)
        values = jnp.round(array * (1 / scale)).astype(jnp.int8)
        return cls(values, jnp.squeeze(scale, over))

    @staticmethod
    def dims(dims: str) -> "Int8":
        """The dimensions of both, of a matrix with these: `Int8("LNHD", "LD")`."""
        contracted = CONTRACTED[dims.removeprefix("L")]
        return Int8(dims, "".join(dim for dim in dims if dim not in contracted))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def is_quantized(dims: str) -> bool:
    """Whether a parameter of these dimensions is an `Int8` in an int8 model."""
    return dims.removeprefix("L") in CONTRACTED


def einsum(spec: str, x: Array, weight: Array | Int8, *, dtype: Any = None) -> Array:
    """`jnp.einsum` in x's dtype, such as ("BTD,DNH->BTNH", x, weight); the result in `dtype`, by
    default x's.

    The gradient of a weight, a sum over all positions, is added in float32 whatever x is: a matmul
    whose result is bfloat16 may add in it, as XLA's on CPUs does (2 % off after 16,384 positions).
    It is rounded once, to x's dtype: with results of float32 a scanned training step on H100s hides
    12 of its 17 all-reduces, in place of 16. `spec` names each dimension by one letter, and a
    weight's all stand in x or the result.

    Of an `Int8` the compiler reads single bytes: whole numbers up to 127 are exact in bfloat16, so
    they are converted on the way into the matmul, and the scale comes after it, on its far smaller
    result. Sums wait for it in float32 and are rounded once. The scale's dimensions must be the
    result's last.
    """
    if hasattr(weight, "einsum"):
        return weight.einsum(spec, x, dtype=dtype)
    if not isinstance(weight, Int8):
        return checkpoint_name(_product(*varying_alike(x, weight), spec, dtype), MATMUL)
    sums = jnp.einsum(spec, x, weight.values.astype(x.dtype), preferred_element_type=jnp.float32)
    return (sums * aligned(weight.scale, sums.ndim)).astype(dtype or x.dtype)


def aligned(x: Array, ndim: int) -> Array:
    """`x` with dimensions of one before its own, `ndim` in all: jax may be asked to add none
    silently.
    """
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def products(specs: tuple[str, ...], x: Array, weights: tuple) -> tuple[Array, ...]:
    """`einsum` of one input and several matrices."""
    return tuple([einsum(spec, x, weight) for spec, weight in zip(specs, weights, strict=True)])


GATE_UP = functools.partial(products, ("BTD,DF->BTF", "BTD,DF->BTF"))
"""The first products of an MLP, or of a shared expert."""


def biased(spec: str, x: Array, weights: tuple) -> Array:
    """`einsum` of x and a matrix, plus a bias. weights: (the matrix, the bias or None)."""
    weight, bias = weights
    out = einsum(spec, x, weight)
    return out if bias is None else add_bias(out, bias)


def add_bias(x: Array, bias: Array) -> Array:
    """x [B, T, ...] plus a float32 bias [...], in x's dtype.

    Added in float32, for the gradient's sake: the bias's is a sum over all positions, in the dtype
    of the addition.
    """
    return (x.astype(jnp.float32) + bias[None, None]).astype(x.dtype)


def rows(table: Array | Int8, indices: Array, *, dtype: jnp.dtype) -> Array:
    """Rows [..., D] of a table [V, D], in `dtype`; no more is read and converted than what is
    looked up.

    The gradient of an array, a sum over all positions that hold a token, is made in float32 and
    rounded to the table's dtype once, where that is another: a table that was gathered for this.
    """
    if not isinstance(table, Int8):
        return _looked_up(pvary(table, varying(indices)), indices, jnp.dtype(dtype))
    values = jnp.take(table.values, indices, axis=0)
    return (values * jnp.take(table.scale, indices, axis=0)[..., None]).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x, weight, spec, dtype):
    return jnp.einsum(spec, x, weight.astype(x.dtype), preferred_element_type=dtype)


def _product_forward(x, weight, spec, dtype):
    used = weight.astype(x.dtype)
    # unwrapped, as in every such rule: so a gradient has a forward derivative (`jax.jvp` of `jax.grad`)
    return _product.__wrapped__(x, used, spec, dtype), (x, used, jnp.zeros((), weight.dtype))


def _product_backward(spec, dtype, residuals, gradient):
    operands, out = spec.split("->")
    of_x, of_weight = operands.split(",")
    x, weight, like = residuals
    of_input = jnp.einsum(f"{out},{of_weight}->{of_x}", gradient, weight)
    of_input = of_input.astype(x.dtype)
    shared = set(of_x) & set(of_weight)
    batch_first = "".join(sorted(out, key=lambda letter: letter not in shared))
    # XLA for CPUs has no float32 sums of bfloat16 whose batch dimension comes later
    if batch_first != out:
        gradient = jnp.einsum(f"{out}->{batch_first}", gradient)
        out = batch_first
    summed = jnp.einsum(
        f"{of_x},{out}->{of_weight}", x, gradient, preferred_element_type=jnp.float32
    )
    return of_input, summed.astype(x.dtype).astype(like.dtype)


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _looked_up(table, indices, dtype):
    return jnp.take(table, indices, axis=0).astype(dtype)


def _looked_up_backward(dtype, residuals, gradient):
    table, indices = residuals  # of the table only the type is used
    summed = jnp.zeros_like(table, jnp.float32).at[indices].add(gradient.astype(jnp.float32))
    return summed.astype(table.dtype), None


_looked_up.defvjp(
    lambda table, indices, dtype: (_looked_up.__wrapped__(table, indices, dtype), (table, indices)),
    _looked_up_backward,
)
