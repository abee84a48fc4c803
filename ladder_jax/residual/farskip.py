"""FarSkip-Collective (arXiv 2511.11505): a ladder whose shared expert is reduced together with attention.

With a_k attention, s_k the shared expert and r_k the routed experts of layer k, and x_k the stream after it:

    a_k = Attn(x_{k-1} - r_{k-1});   s_k, r_k = Shared(x_{k-1}), Routed(x_{k-1});   x_k = x_{k-1} + a_k + s_k + r_k

Both of a layer's all-reduces overlap compute: that of a_k + s_k the routed experts, that of r_k the next attention. A
layer has three sublayers, (attention, routed experts, shared expert). Without a shared expert it is `ladder`.

A first layer without experts is one with r_k = 0, whose MLP is its shared expert: attention and MLP read x_{k-1} and
are reduced together, as in `parallel`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ladder_jax.residual.recurrence import Step

ROUTED, SHARED = 1, 2  # of a layer's sublayers


def of_ladder(layers: Sequence[Sequence[Step]], *, dense: int = 0) -> tuple[tuple[Step, ...], ...]:
    """A ladder's layers as FarSkip's; those of its layers that are standard add both kinds of experts up.

    dense: how many of the first have no experts, and stay as they are.
    """

    def experts(step: Step) -> Step:
        if step.delay == 0:
            return dataclasses.replace(step, sublayers=(ROUTED, SHARED))
        return dataclasses.replace(step, early=(SHARED,))

    return (*layers[:dense], *((attention, experts(mlp)) for attention, mlp in layers[dense:]))


def with_dense(topology: Any, *, layers: int) -> Any:
    """A Topology of farskip whose first `layers` have no experts: nothing is pending after them."""
    delays, joint = list(topology.delays), list(topology.joint)
    for layer in range(layers):
        joint[layer] = delays[2 * layer] > 0
        delays[2 * layer] = 0
    if layers < len(joint):
        delays[2 * layers] = 0
    return dataclasses.replace(topology, delays=tuple(delays), joint=tuple(joint), dense=layers)
