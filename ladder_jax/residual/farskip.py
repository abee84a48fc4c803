"""FarSkip-Collective (arXiv 2511.11505): a ladder whose shared expert is reduced together with attention.

With a_k attention, s_k the shared expert and r_k the routed experts of layer k, and x_k the stream after it:

    a_k = Attn(x_{k-1} - r_{k-1});   s_k, r_k = Shared(x_{k-1}), Routed(x_{k-1});   x_k = x_{k-1} + a_k + s_k + r_k

Both of a layer's all-reduces overlap compute: that of a_k + s_k the routed experts, that of r_k the next attention. A
layer has three sublayers, (attention, routed experts, shared expert). Without a shared expert it is `ladder`.
"""

import dataclasses
from collections.abc import Sequence

from ladder_jax.residual.steps import Delayed

ROUTED, SHARED = 1, 2  # of a layer's sublayers


def of_ladder(layers: Sequence[Sequence[Delayed]]) -> tuple[tuple[Delayed, ...], ...]:
    """A ladder's layers as FarSkip's; those of its layers that are standard add both kinds of experts up."""

    def experts(step: Delayed) -> Delayed:
        if step.delay == 0:
            return dataclasses.replace(step, sublayers=(ROUTED, SHARED))
        return dataclasses.replace(step, early=(SHARED,))

    return tuple((attention, experts(mlp)) for attention, mlp in layers)
