"""Layers between standard and ladder: the newest outputs are faded out of a sublayer's input, at run time.

A ladder's sublayer i reads a stream without the newest d_i outputs; a standard one waits for them. In between, with the
ladder fraction f from 0 (standard) to 1 (ladder),

    x_i = x_{i-1} + AR(h_i(x_{i-1-d} + (1 - f) (x_{i-1} - x_{i-1-d})))

and for a fresh ladder, whose input holds the rank's own newest partial p, the last factor is (AR(p) - p). At both ends
it is the topology's own arithmetic. While f may be below 1 a sublayer waits for every all-reduce: none is hidden, no
barrier is needed to keep them apart, and so the wire has an `advance` of its own. A farskip's shared expert has an
all-reduce of its own, because its input may wait for attention's.
"""

import dataclasses
from collections.abc import Sequence

import jax

from ladder_jax.parallel.collectives import PREVIOUS
from ladder_jax.residual.recurrence import AllReduce, State, Step, Sublayer, Sums, add, compute


@dataclasses.dataclass(frozen=True)
class Annealed(AllReduce):
    """Steps with a delay, `ladder_fraction` (a float32 scalar) of the way from standard; others are as they were."""

    ladder_fraction: jax.Array

    def advance(self, state: State, step: Step, sublayers: Sequence[Sublayer]) -> State:
        if not step.delay:
            return super().advance(state, step, sublayers)
        own = state.partial
        launched = step.launched(state.sums, self.reduce(own, PREVIOUS))
        read = step.read(launched)
        fading = _share(launched[len(read) :], 1 - self.ladder_fraction)
        entered = self.enter(step, add(add(state.residual, read), fading), sublayers)
        if step.fresh:
            entered = add(entered, _share((own,), self.ladder_fraction))
        if step.early:
            early = self.reduce(self.compute_early(step, entered, sublayers))
            launched = (add(launched[0], (early,)), *launched[1:])
        partial = compute(entered, step.sublayers, sublayers, axes=self.axes)
        return self.settled(step, state.residual, launched, partial)


def _share(sums: Sums, factor: jax.Array) -> Sums:
    return tuple(None if one is None else (one * factor).astype(one.dtype) for one in sums)
