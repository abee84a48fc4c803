"""The low-rank factors of a plan: declared as all parameters are, joined with the matrices, and merged into them."""

import math
from typing import Any

import jax
from flax import nnx

from ladder_jax.config import LoraConfig
from ladder_jax.nn import ModelDef, Params, parameter
from ladder_jax.nn.low_rank import LowRank
from ladder_jax.nn.quantized import CONTRACTED

OF = {"query": "attention", "key": "attention", "value": "attention", "out": "attention"}  # the others': "mlp"


class Group(nnx.Module):
    """Modules and parameters by name."""

    def __init__(self, **members: Any):
        for name, member in members.items():
            setattr(self, name, member)


def declare(definition: ModelDef, *, config: LoraConfig, layers: int) -> Group:
    """The factors of the targets in the topmost `layers` layers, stacked; the first is random, the second zero."""
    shape = parameter.Sizes(definition.config, definition.layout.ranks)
    sizes = parameter.Sizes(
        definition.config, definition.layout.ranks, stacked=True, low_rank=config.rank, layers=layers
    )

    def factors(target: str) -> Group:
        dims = definition.dims["layers"][OF.get(target, "mlp")][target].removeprefix("L")
        down, up = LowRank.dims(dims)
        fan_in = math.prod(shape[dim] for dim in CONTRACTED[dims])
        spread = parameter.Normal(1 / math.sqrt(fan_in))
        return Group(
            down=parameter.declare(down, sizes=sizes, init=spread),
            up=parameter.declare(up, sizes=sizes, init=parameter.zeros),
        )

    of = lambda group: {name: factors(name) for name in config.names if OF.get(name, "mlp") == group}
    return Group(**{group: Group(**of(group)) for group in ("attention", "mlp") if of(group)})


def beside(stack: Params, factors: Params, *, scale: float) -> Params:
    """`stack` [L, ...] (arrays, shapes or dimensions), a LowRank in place of each matrix that has factors."""
    joined = dict(stack)
    for group, targets in factors.items():
        here = {name: LowRank(stack[group][name], f["down"], f["up"], scale) for name, f in targets.items()}
        joined[group] = {**stack[group], **here}
    return joined


def trains(stack: Params) -> Params:
    """True for each factor in a stack that `beside` gave, False for all else."""
    is_pair = lambda leaf: isinstance(leaf, LowRank)
    return jax.tree.map(lambda a: LowRank(False, True, True, a.scale) if is_pair(a) else False, stack, is_leaf=is_pair)


def merged(stack: Params, factors: Params, *, dims: Params, scale: float) -> Params:
    """The stack whose matrices compute what theirs and the factors' products did, in float32."""
    joined = beside(stack, factors, scale=scale)
    is_pair = lambda leaf: isinstance(leaf, LowRank)
    return jax.tree.map(lambda a, d: a.merged(d) if is_pair(a) else a, joined, dims, is_leaf=is_pair)
