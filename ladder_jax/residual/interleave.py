"""Two halves of a batch in turn: while the output of one half is summed over the ranks, the other
half computes.

The function is the topology's own, for any topology: rows do not depend on each other, and a
weight's gradient is a sum over rows. Half A is one step ahead of half B, and a turn of A is

    launch   summed  = reduce(B's partial)                          needs nothing that this turn computes
             entered = enter(A's stream)
    compute  entered, B's stream, summed = barrier_backward((entered, B's stream, summed))
             partial = sublayer(entered)                            the overlap
    await    partial, summed = barrier_forward((partial, summed))
             B's stream + summed

then likewise with A and B exchanged. A loop carries B's output un-reduced, as a Ladder's does: so
in a scan's body each sum stands beside compute. Backward it is the same pipeline: the gradient of
A's input is summed over the ranks while B's earlier step is differentiated. Without the barriers a
compiler merges the sums of both halves, and hides none.

The price: every half reads all weights, and its matmuls have half the rows. It pays where rows are
many, in training and in prefill; in decoding a Ladder is what remains.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ladder_jax.errors import UserError
from ladder_jax.residual.recurrence import AllReduce, State, Step, Sublayer, add, with_next
from ladder_jax.scopes import FOLLOWING, PREVIOUS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """The states of both halves between two turns.

    ready: of the half whose turn it is. All its outputs are reduced; those that are not added yet
        are its `sums`.
    computed: of the other one. Its `partial` is not reduced yet, and `sums` are the outputs before
        it.
    """

    ready: State
    computed: State

    @property
    def residual(self) -> Array:
        return self.computed.residual

    @property
    def partial(self) -> Array | None:
        return self.computed.partial


@dataclasses.dataclass(frozen=True)
class Turn(Step):
    """A step, and the one that follows it."""

    after: Step | None = None


@dataclasses.dataclass(frozen=True)
class OtherHalf:
    """The half whose output crosses the ranks while this half's sublayer computes.

    launched: its newest output, on its way. after: its next step, for which it becomes ready, with
        its own `sublayers`.
    out, into: the name scopes of that output and of that step's input, relative to the sublayer
        that computes.
    """

    state: State
    launched: Any
    after: Step
    sublayers: Sequence[Sublayer]
    out: str
    into: str

    def settled(self, residual: Array, summed: Array | None) -> State:
        """Once `summed` has arrived: the residual holds all outputs but those that stay pending
        before `after`.
        """
        sums = (*self.state.sums, summed)
        added = len(sums) - self.after.pending_before
        own = self.state.partial if self.after.fresh else None
        return State(add(residual, sums[:added]), sums[added:], own)


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """The wire `wire`, in two halves: of the rows (axis 0) or of the sequence (axis 1), the first
    `at` of them.
    """

    wire: AllReduce
    at: int
    axis: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        return self.wire.axes

    def layers(self, layers: Sequence[Sequence[Step]]) -> tuple[tuple[Turn, ...], ...]:
        """Raises UserError for a topology that does not reduce every output, or reduces two in one
        step.
        """
        if not all(step.reduces for steps in layers for step in steps):
            raise UserError(
                "interleave=2 is for a residual that reduces every sublayer's output: not desync-n"
            )
        if any(step.early for steps in layers for step in steps):
            raise UserError(
                "interleave=2 is not for farskip, whose shared expert is reduced with attention"
            )
        return with_next(layers, lambda step, after: Turn(**vars(step), after=after))

    def begin(self, x: Array, first: Step) -> Pair:
        """Both halves of `x` [B, T, D] before `first`."""
        ready, computed = jnp.split(x, [self.at], axis=self.axis)
        pending = first.pending_before
        return Pair(State(ready, (None,) * pending), State(computed, (None,) * (pending - 1)))

    def advance(self, pair: Pair, step: Turn, sublayers: Sequence[Sequence[Sublayer]]) -> Pair:
        """Both halves after `step`. sublayers: of each half."""
        of_first, of_second = sublayers
        first, second = self._turn(
            step, pair, of_first, after=step, others=of_second, out=PREVIOUS, into=""
        )
        second, first = self._turn(
            step,
            Pair(second, first),
            of_second,
            after=step.after,
            others=of_first,
            out="",
            into=FOLLOWING,
        )
        return Pair(first, second)

    def _turn(self, step, pair, sublayers, *, after, others, out, into):
        """(the ready half, whose `step` is computed; the other one, ready for its next step)."""
        mine = pair.ready
        state = pair.computed
        wire = self.wire.beside(step, sublayers)
        launched = wire.launch(step, state.partial, state.residual, out)
        entered = mine.carried
        if entered is None:
            entered = wire.enter(step, add(mine.residual, step.read(mine.sums)), sublayers)
        other = OtherHalf(state, launched, after, others, out, into)
        partial, arrived = wire.turn(step, entered, sublayers, own=mine.partial, other=other)
        return State(mine.residual, mine.sums, partial), arrived

    def fill(self, pair: Pair, steps: Sequence[Step], *, dtype: jnp.dtype) -> Pair:
        """Zeros in place of None, and as many sums as after a turn of the scan: see
        `AllReduce.fill`.
        """
        first = steps[0]
        last = steps[-1]
        wire = self.wire
        ready = pair.ready
        computed = pair.computed
        sums, own = wire.filled(ready.residual, ready.sums, ready.partial, dtype)
        ready = State(ready.residual, sums, own if first.fresh else None, ready.carried)
        ready = wire.prepare(first, ready, "") if ready.carried is None else ready
        residual = computed.residual
        sums = computed.sums
        more = len(sums) - last.pending_before
        if more > 0:  # the next turn would add them first
            residual = add(residual, sums[:more])
            sums = sums[more:]
        sums, partial = wire.filled(residual, (None,) * -more + sums, computed.partial, dtype)
        return Pair(ready, State(residual, sums, partial))

    def flush(self, pair: Pair) -> Array:
        """The final stream of both halves: everything still pending is reduced and added."""
        ready = pair.ready
        computed = pair.computed
        first = add(ready.residual, ready.sums)
        return jnp.concatenate([first, self.wire.flush(computed)], axis=self.axis)
