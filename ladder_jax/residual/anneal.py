"""Layers between standard and ladder: what a sublayer's input leaves out is faded out, at run time.

A ladder's sublayer i reads a stream without the newest d_i outputs; the standard one waits for them. In between,
with `late` from 0 (standard) to 1 (ladder),

    x_i = x_{i-1} + AR(h_i(x_{i-1-d} + (1 - late) (x_{i-1} - x_{i-1-d})))

and for a fresh ladder, whose input holds the rank's own newest partial p, the last factor is (AR(p) - p). At both ends
it is the topology's own arithmetic. While `late` may be below 1 a sublayer waits for every all-reduce: nothing is
hidden, and no barrier is needed to keep reductions apart. Steps carry the same `State` as those that they stand for.
"""

import dataclasses
from collections.abc import Sequence

import jax

from ladder_jax.parallel.collectives import ENTER, PREVIOUS, vary
from ladder_jax.residual.launch import reduced
from ladder_jax.residual.state import State, Sublayer, add, check_axes, compute
from ladder_jax.residual.steps import Delayed


@dataclasses.dataclass(frozen=True)
class Annealed:
    """A ladder's step, `late` of the way from standard. late: a float32 scalar."""

    step: Delayed
    late: jax.Array

    @property
    def sublayers(self) -> tuple[int, ...]:
        return self.step.sublayers

    def __call__(self, state: State, sublayers: Sequence[Sublayer], *, axes: tuple[str, ...], **_) -> State:
        check_axes(axes)
        step, own = self.step, state.partial
        launched = (*state.sums, reduced(own, axes, PREVIOUS)) if step.lag else ()
        known = step.lag - step.skip
        stream = add(add(state.residual, launched[:known]), self._share(launched[known:], 1 - self.late))
        with jax.named_scope(ENTER):
            entered = vary(stream, axes)
        if step.fresh:
            entered = add(entered, self._share((own,), self.late))
        partial = compute(entered, step.sublayers, sublayers, axes=axes)
        if step.keep == 0:
            return State(add(state.residual, (*launched, reduced(partial, axes))))
        added = step.lag + 1 - step.keep
        return State(add(state.residual, launched[:added]), launched[added:], partial)

    @staticmethod
    def _share(sums: Sequence[jax.Array | None], factor: jax.Array) -> list[jax.Array | None]:
        return [None if s is None else (s * factor).astype(s.dtype) for s in sums]


def steps(of_layer: Sequence[Delayed], *, late: jax.Array) -> tuple[Delayed | Annealed, ...]:
    """A layer's steps; those of a standard layer, which leave nothing out, as they are."""
    return tuple(Annealed(step, late) if step.skip else step for step in of_layer)
