"""Layers between standard and ladder: the newest outputs are faded out of a sublayer's input, at run time.

A ladder's sublayer i reads a stream without the newest d_i outputs; a standard one waits for them. In between, with the
ladder fraction f from 0 (standard) to 1 (ladder),

    x_i = x_{i-1} + AR(h_i(x_{i-1-d} + (1 - f) (x_{i-1} - x_{i-1-d})))

and for a fresh ladder, whose input holds the rank's own newest partial p, the last factor is (AR(p) - p). At both ends
it is the topology's own arithmetic. While f may be below 1 a sublayer waits for every all-reduce: none is hidden, and
no barrier is needed to keep them apart. A farskip's shared expert has an all-reduce of its own, because its input may
wait for attention's. An annealed step carries the same `State` as the step that it replaces.
"""

import dataclasses
from collections.abc import Sequence

import jax

from ladder_jax.parallel.collectives import ENTER, PREVIOUS, pvary
from ladder_jax.residual.steps import Delayed, State, Sublayer, add, check_axes, compute, reduced


@dataclasses.dataclass(frozen=True)
class Annealed:
    """A ladder's step, `ladder_fraction` (a float32 scalar) of the way from standard."""

    step: Delayed
    ladder_fraction: jax.Array

    @property
    def sublayers(self) -> tuple[int, ...]:
        return self.step.sublayers

    def __call__(self, state: State, sublayers: Sequence[Sublayer], *, axes: tuple[str, ...], **_) -> State:
        check_axes(axes)
        step, own = self.step, state.partial
        launched = (*state.sums, reduced(own, axes, PREVIOUS)) if step.pending_before else ()
        known = step.pending_before - step.delay
        stream = add(add(state.residual, launched[:known]), self._share(launched[known:], 1 - self.ladder_fraction))
        with jax.named_scope(ENTER):
            entered = pvary(stream, axes)
        if step.fresh:
            entered = add(entered, self._share((own,), self.ladder_fraction))
        if step.early:  # a farskip's shared expert
            early = compute(entered, step.early, sublayers, axes=axes)
            launched = (add(launched[0], (reduced(early, axes),)), *launched[1:])
        partial = compute(entered, step.sublayers, sublayers, axes=axes)
        if step.pending_after == 0:
            return State(add(state.residual, (*launched, reduced(partial, axes))))
        added = step.pending_before + 1 - step.pending_after
        return State(add(state.residual, launched[:added]), launched[added:], partial)

    @staticmethod
    def _share(sums: Sequence[jax.Array | None], factor: jax.Array) -> list[jax.Array | None]:
        return [None if s is None else (s * factor).astype(s.dtype) for s in sums]


def steps(of_layer: Sequence[Delayed], *, ladder_fraction: jax.Array) -> tuple[Delayed | Annealed, ...]:
    """A layer's steps, annealed; a standard layer's, whose inputs leave nothing out, are unchanged."""
    return tuple(Annealed(step, ladder_fraction) if step.delay else step for step in of_layer)
