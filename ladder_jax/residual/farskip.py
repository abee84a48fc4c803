"""FarSkip-Collective (arXiv 2511.11505): a ladder whose shared expert is reduced together with attention.

With a_k attention, s_k the shared expert and r_k the routed experts of layer k, and x_k the stream after it:

    a_k = Attn(x_{k-1} - r_{k-1});   s_k, r_k = Shared(x_{k-1}), Routed(x_{k-1});   x_k = x_{k-1} + a_k + s_k + r_k

Both of a layer's all-reduces overlap compute: that of a_k + s_k the routed experts, that of r_k the next attention. A
layer has three sublayers, (attention, routed experts, shared expert). Without a shared expert it is `ladder`.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from ladder_jax.config import Launch
from ladder_jax.parallel.collectives import PREVIOUS
from ladder_jax.residual.steps import (
    Delayed,
    State,
    Sublayer,
    add,
    await_backward,
    await_forward,
    check_axes,
    compute,
    done,
    reduced,
    start,
    to_sublayer_input,
)

ROUTED, SHARED = 1, 2  # of a layer's sublayers


@dataclasses.dataclass(frozen=True)
class RoutedExperts(Delayed):
    """A ladder's step that computes the routed experts, after the shared one, which is reduced with attention's output.

    launch   summed = all_reduce(partial + shared(entered))
    compute  fresh  = routed(entered)
    """

    early: ClassVar[tuple[int, ...]] = (SHARED,)

    def __call__(
        self,
        state: State,
        sublayers: Sequence[Sublayer],
        *,
        axes: tuple[str, ...],
        launch: Launch = Launch.CHAINED,
    ) -> State:
        check_axes(axes)
        in_halves = launch is Launch.EXPLICIT
        entered, residual = to_sublayer_input(state.residual, axes), state.residual
        both = state.partial + compute(entered, self.early, sublayers, axes=axes)
        launched = (None if in_halves else reduced(both, axes, PREVIOUS),)
        if self.pending_after:
            entered, residual, launched = await_backward(entered, residual, launched, axes)
        if in_halves:
            entered, sublayers, started = start(both, axes, entered, self.sublayers, sublayers)
        partial = compute(entered, self.sublayers, sublayers, axes=axes)
        if in_halves:
            partial, *launched = done(partial, started)
        else:
            partial, launched = await_forward(partial, launched, axes)
        residual = add(residual, launched)
        if self.pending_after == 0:
            return State(add(residual, (reduced(partial, axes),)))
        return State(residual, (), partial)


def of_ladder(layers: Sequence[Sequence[Delayed]]) -> tuple[tuple[Delayed, ...], ...]:
    """A ladder's layers as FarSkip's; those of its layers that are standard add both kinds of experts up."""

    def experts(step: Delayed) -> Delayed:
        if step.delay == 0:
            return dataclasses.replace(step, sublayers=(ROUTED, SHARED))
        return RoutedExperts(**{field.name: getattr(step, field.name) for field in dataclasses.fields(step)})

    return tuple((attention, experts(mlp)) for attention, mlp in layers)
