"""LoRA's low-rank factors: declared like all parameters, attached to the matrices, and merged into them."""

import math
from typing import Any

import jax
from flax import nnx

from ladder_jax.config import LoraConfig
from ladder_jax.nn import ModelDef, Params, parameter
from ladder_jax.nn.low_rank import LowRank
from ladder_jax.nn.quantized import CONTRACTED


class Group(nnx.Module):
    """Modules and parameters by name."""

    def __init__(self, **members: Any):
        for name, member in members.items():
            setattr(self, name, member)


def declare(definition: ModelDef, *, config: LoraConfig, layers: int) -> Group:
    """The factors of the targets in the topmost `layers` layers, stacked; `down` starts random, `up` zero."""
    shape = parameter.Sizes(definition.config, definition.layout.ranks)
    sizes = parameter.Sizes(
        definition.config, definition.layout.ranks, stacked=True, low_rank=config.rank, layers=layers
    )

    def factors(dims: str) -> Group:
        down, up = LowRank.dims(dims)
        fan_in = math.prod(shape[dim] for dim in CONTRACTED[dims])
        normal = parameter.Normal(1 / math.sqrt(fan_in))
        return Group(
            down=parameter.declare(down, sizes=sizes, init=normal),
            up=parameter.declare(up, sizes=sizes, init=parameter.zeros),
        )

    def groups(modules: Params) -> dict[str, Group]:
        members = {}
        for name, dims in modules.items():
            if isinstance(dims, dict):
                if inner := groups(dims):
                    members[name] = Group(**inner)
            elif name in config.names:
                members[name] = factors(dims.removeprefix("L"))
        return members

    return Group(**groups(definition.dims["layers"]))


def attach(stack: Params, factors: Params, *, scale: float) -> Params:
    """`stack` [L, ...] (arrays, shapes or dimensions) with a LowRank in place of each matrix that has factors."""
    attached = dict(stack)
    for name, inner in factors.items():
        is_group = any(isinstance(member, dict) for member in inner.values())
        pair = lambda base, down, up: LowRank(base, down, up, scale)
        attached[name] = attach(stack[name], inner, scale=scale) if is_group else pair(stack[name], **inner)
    return attached


def merge(stack: Params, factors: Params, *, dims: Params, scale: float) -> Params:
    """`stack` with each matrix replaced by its sum with its factors' product, added in float32."""
    attached = attach(stack, factors, scale=scale)
    is_pair = lambda leaf: isinstance(leaf, LowRank)
    return jax.tree.map(lambda a, d: a.merged(d) if is_pair(a) else a, attached, dims, is_leaf=is_pair)
