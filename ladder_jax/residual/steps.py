"""The steps of a topology: each computes one sublayer, or two together, and moves the state on."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from ladder_jax.config import Launch
from ladder_jax.parallel.collectives import PREVIOUS, pvary, ranks, varying
from ladder_jax.residual.launch import await_backward, await_forward, opaque_copy, reduced, start, to_sublayer_input
from ladder_jax.residual.state import State, Sublayer, add, check_axes, compute


@dataclasses.dataclass(frozen=True)
class Delayed:
    """A step of the one rule: launch, compute, await.

    sublayers: which of a layer's (attention, MLP) it computes; both are summed before one reduction.
    pending_before: how many outputs are not yet part of the residual when the step starts.
    delay: how many of them, the newest, its input leaves out, counted in steps.
    pending_after: how many, its own among them, stay outside the residual after it; 0 reduces at once.
    fresh: the input also holds this rank's own partial of the output that it leaves out.
    """

    sublayers: tuple[int, ...]
    pending_before: int
    delay: int
    pending_after: int
    fresh: bool = False

    def __call__(
        self,
        state: State,
        sublayers: Sequence[Sublayer],
        *,
        axes: tuple[str, ...],
        launch: Launch = Launch.CHAINED,
    ) -> State:
        check_axes(axes)
        by_name = launch is Launch.EXPLICIT and self.delay > 0
        pending = opaque_copy(state.partial, axes) if self.fresh else state.partial
        launched = (
            (*state.sums, (start if by_name else reduced)(pending, axes, PREVIOUS)) if self.pending_before else ()
        )
        stream = add(state.residual, launched[: self.pending_before - self.delay])
        entered, residual = to_sublayer_input(stream, axes), state.residual
        if self.pending_after and not by_name:
            entered, residual, launched = await_backward(entered, residual, launched, axes)
        if self.fresh:
            entered = add(entered, (state.partial,))
        partial = compute(entered, self.sublayers, sublayers, axes=axes)
        if by_name and launched[-1] is not None:
            launched = (*launched[:-1], launched[-1].done())
        elif self.delay:
            partial, launched = await_forward(partial, launched, axes)
        if self.pending_after == 0:
            return State(add(residual, (*launched, reduced(partial, axes))))
        added = self.pending_before + 1 - self.pending_after
        return State(add(residual, launched[:added]), launched[added:], partial)

    def fill(self, state: State, *, axes: tuple[str, ...], dtype: jnp.dtype) -> State:
        """`state` with zeros for None: what a loop must carry, so that its first turn is like all."""
        if self.pending_before == 0:
            return state
        zero = pvary(jnp.zeros(state.residual.shape, dtype), varying(state.residual))
        sums = tuple(zero if s is None else s for s in state.sums)
        return dataclasses.replace(
            state, sums=sums, partial=pvary(zero, axes) if state.partial is None else state.partial
        )


@dataclasses.dataclass(frozen=True)
class Desynced:
    """A step on rank-local streams; `sync` averages them and sums the newest partials, in one all-reduce.

    The mean of the ranks' streams is the last synced stream plus the mean of what each has added
    since, its drift; so only drift / ranks + partial crosses the wire, and `State.partial` is the drift.
    """

    sublayers: tuple[int, ...]
    phase: int  # sublayers since the last all-reduce
    sync: bool
    delay: ClassVar[int] = 0
    pending_before: ClassVar[int] = 0

    def __call__(self, state: State, sublayers: Sequence[Sublayer], *, axes: tuple[str, ...], **_) -> State:
        check_axes(axes)
        local = to_sublayer_input(state.residual, axes) if state.local is None else state.local
        partial = compute(local, self.sublayers, sublayers, axes=axes)
        if self.sync:
            if state.partial is not None:
                partial = partial + state.partial / ranks(axes)
            return State(add(state.residual, (reduced(partial, axes),)))
        drift = partial if state.partial is None else state.partial + partial
        return State(state.residual, (), drift, add(local, (partial,)))

    def fill(self, state: State, *, axes: tuple[str, ...], dtype: jnp.dtype) -> State:
        return state  # loops start where the ranks agree: nothing is pending


@dataclasses.dataclass(frozen=True)
class Silent:
    """A step of the standard Transformer without its all-reduce: wrong numbers, for timing only."""

    sublayers: tuple[int, ...]
    delay: ClassVar[int] = 0
    pending_before: ClassVar[int] = 0

    def __call__(self, state: State, sublayers: Sequence[Sublayer], *, axes: tuple[str, ...], **_) -> State:
        check_axes(axes)
        return State(add(state.residual, (compute(state.residual, self.sublayers, sublayers, axes=axes),)))

    def fill(self, state: State, *, axes: tuple[str, ...], dtype: jnp.dtype) -> State:
        return state


Step = Delayed | Desynced | Silent


def fill(state: State, steps: Sequence[Step], *, axes: tuple[str, ...], dtype: jnp.dtype | None = None) -> State:
    """`state` for a `lax.scan` over layers of equal `steps`: zeros where nothing is pending yet.

    A carry keeps its structure from turn to turn; so the first turn reduces zeros, which an unrolled loop does not.
    dtype: of what sublayers return, without it the stream's.
    """
    return steps[0].fill(state, axes=axes, dtype=state.residual.dtype if dtype is None else dtype)


def flush(state: State, *, axes: tuple[str, ...]) -> jax.Array:
    """The final residual stream [B, T, D]: everything still pending is reduced and added."""
    return add(state.residual, (*state.sums, reduced(state.partial, axes, PREVIOUS)))
