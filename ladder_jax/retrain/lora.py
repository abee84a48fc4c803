"""LoRA's low-rank factors: declared like all parameters, attached to the matrices, and merged into them."""

import math
from typing import Any

import jax
from flax import nnx

from ladder_jax.config import LoraConfig
from ladder_jax.nn import ModelDef, Params, parameter
from ladder_jax.nn.low_rank import LowRank
from ladder_jax.nn.quantized import CONTRACTED

SUBLAYER = dict.fromkeys(("query", "key", "value", "out"), "attention") | dict.fromkeys(("gate", "up", "down"), "mlp")


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

    def factors(target: str) -> Group:
        dims = definition.dims["layers"][SUBLAYER[target]][target].removeprefix("L")
        down, up = LowRank.dims(dims)
        fan_in = math.prod(shape[dim] for dim in CONTRACTED[dims])
        normal = parameter.Normal(1 / math.sqrt(fan_in))
        return Group(
            down=parameter.declare(down, sizes=sizes, init=normal),
            up=parameter.declare(up, sizes=sizes, init=parameter.zeros),
        )

    targets = lambda group: {name: factors(name) for name in config.names if SUBLAYER[name] == group}
    return Group(**{group: Group(**targets(group)) for group in ("attention", "mlp") if targets(group)})


def attach(stack: Params, factors: Params, *, scale: float) -> Params:
    """`stack` [L, ...] (arrays, shapes or dimensions) with a LowRank in place of each matrix that has factors."""
    attached = dict(stack)
    for group, targets in factors.items():
        pairs = {name: LowRank(stack[group][name], f["down"], f["up"], scale) for name, f in targets.items()}
        attached[group] = {**stack[group], **pairs}
    return attached


def trainable(stack: Params) -> Params:
    """True for each factor in a stack that `attach` gave, False for every other array."""
    is_pair = lambda leaf: isinstance(leaf, LowRank)
    return jax.tree.map(lambda a: LowRank(False, True, True, a.scale) if is_pair(a) else False, stack, is_leaf=is_pair)


def merge(stack: Params, factors: Params, *, dims: Params, scale: float) -> Params:
    """`stack` with each matrix replaced by its sum with its factors' product, added in float32."""
    attached = attach(stack, factors, scale=scale)
    is_pair = lambda leaf: isinstance(leaf, LowRank)
    return jax.tree.map(lambda a, d: a.merged(d) if is_pair(a) else a, attached, dims, is_leaf=is_pair)
