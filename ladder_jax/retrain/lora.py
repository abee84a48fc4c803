"""LoRA (arXiv 2106.09685): a frozen matrix plus the product of two thin matrices that train.

The factors are declared like all parameters, attached to the matrices, and merged into them. The
model calls `quantized.einsum` or `grouped_matmul` with a `LowRank` as with an array. On a rank both
factors are split with the matrix, by the letters of their dimensions (R is the rank of the
product): of a matrix that is split by its outputs, "DNH", `down` "DR" is whole and `up` "RNH" is
split; of one that is split by its inputs, "FD", `down` "FR" is split and the product a partial sum,
as the matrix's own is. Each expert has its own factors: those of "EDM" are "EDR" and "ERM".
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ladder_jax.config import LoraConfig
from ladder_jax.nn import ModelDef, Params, parameter, quantized
from ladder_jax.nn.grouped import Groups, grouped_matmul
from ladder_jax.nn.parameter import Sizes
from ladder_jax.nn.quantized import CONTRACTED


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """`base + scale * down @ up`. down: [inputs, R]; up: [R, outputs]. Only these two have
    gradients.
    """

    base: Any
    down: Any
    up: Any
    scale: float = dataclasses.field(default=1.0, metadata=dict(static=True))

    @staticmethod
    def dims(dims: str) -> tuple[str, str]:
        """Of `down` and `up` beside a matrix with these dimensions: "LDNH" gives "LDR" and
        "LRNH".
        """
        return _factors(dims, quantized.CONTRACTED[dims.removeprefix("L")], rank="R")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def einsum(self, spec: str, x: jax.Array, *, dtype: Any = None) -> jax.Array:
        """As `quantized.einsum`: the sums of both products, in x's dtype."""
        of_x, matrix = spec.split("->")[0].split(",")
        out = spec.split("->")[1]
        inputs = "".join(dim for dim in matrix if dim not in out)
        down, up = _factors(matrix, inputs, rank="r")
        thin = of_x.replace(inputs, "") + "r"
        base = jax.lax.stop_gradient(self.base)  # an unrolled loop asks for every array's gradient
        whole = jnp.einsum(spec, x, base.astype(x.dtype), preferred_element_type=dtype)
        inner = quantized.einsum(f"{of_x},{down}->{thin}", x, self.down)
        outer = quantized.einsum(f"{thin},{up}->{out}", inner, self.up, dtype=dtype)
        return (whole + outer * jnp.float32(self.scale)).astype(whole.dtype)

    def grouped(self, rows: jax.Array, groups: Groups) -> jax.Array:
        """As `grouped_matmul`."""
        whole = grouped_matmul(rows, jax.lax.stop_gradient(self.base), groups)
        outer = grouped_matmul(grouped_matmul(rows, self.down, groups), self.up, groups)
        return (whole + outer * jnp.float32(self.scale)).astype(whole.dtype)

    def merged(self, dims: str) -> jax.Array:
        """One float32 matrix that computes the same. Of stacked layers, [L, ...]."""
        down, up = self.dims(dims)
        product = jnp.einsum(
            f"{down},{up}->{dims}", self.down, self.up, precision=jax.lax.Precision.HIGHEST
        )
        return self.base + self.scale * product


@dataclasses.dataclass(frozen=True)
class FactorSizes(Sizes):
    """low_rank: R, the size between the two factors of a matrix."""

    low_rank: int = 0

    def __getitem__(self, dim: str) -> int:
        return self.low_rank if dim == "R" else super().__getitem__(dim)


def declare(definition: ModelDef, *, config: LoraConfig, layers: int) -> nnx.Dict:
    """The factors of the targets in the topmost `layers` layers, stacked; `down` starts random,
    `up` zero.
    """
    ranks = definition.layout.ranks
    sizes = FactorSizes(definition.config, ranks, layers=layers, low_rank=config.rank)

    def factors(dims: str) -> nnx.Dict:
        down, up = LowRank.dims(dims)
        fan_in = math.prod(sizes[dim] for dim in CONTRACTED[dims])
        normal = parameter.Normal(1 / math.sqrt(fan_in))
        return nnx.Dict(
            down=sizes.declare(down, init=normal),
            up=sizes.declare(up, init=parameter.zeros),
        )

    def group(modules: Params) -> nnx.Dict:
        members = {}
        for name, dims in modules.items():
            if isinstance(dims, dict):
                if inner := group(dims):
                    members[name] = inner
            elif name in config.names:
                members[name] = factors(dims.removeprefix("L"))
        return nnx.Dict(members)

    return group(definition.dims["layers"])


def attach(stack: Params, factors: Params, *, scale: float) -> Params:
    """`stack` [L, ...] (arrays, shapes or dimensions) with a LowRank in place of each matrix that
    has factors.
    """
    attached = dict(stack)
    for name, inner in factors.items():
        if "down" in inner and not isinstance(inner["down"], dict):
            attached[name] = LowRank(stack[name], **inner, scale=scale)
        else:
            attached[name] = attach(stack[name], inner, scale=scale)
    return attached


def merge(stack: Params, factors: Params, *, dims: Params, scale: float) -> Params:
    """`stack` with each matrix replaced by its sum with its factors' product, added in float32."""
    attached = attach(stack, factors, scale=scale)
    is_pair = lambda leaf: isinstance(leaf, LowRank)
    return jax.tree.map(
        lambda a, d: a.merged(d) if is_pair(a) else a, attached, dims, is_leaf=is_pair
    )


def _factors(dims: str, inputs: str, *, rank: str) -> tuple[str, str]:
    """The dimensions of `down` and `up` beside a matrix with these, of which `inputs` are
    contracted.
    """
    led, _, outputs = dims.partition(inputs)
    return f"{led}{inputs}{rank}", f"{led}{rank}{outputs}"
