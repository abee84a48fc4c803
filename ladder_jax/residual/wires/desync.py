"""Wires on which ranks drift apart: Desync (arXiv 2501.06589, section 6), and no communication at
all.

Every rank has a stream of its own, to which it adds its own outputs. A desync's all-reduce averages
the streams and sums the newest partials at once. The mean of the ranks' streams is the last synced
stream plus the mean of what each has added since, its *drift*: so only drift / ranks + partial
crosses the wire.
"""

import dataclasses

from ladder_jax.parallel import pvary, ranks
from ladder_jax.residual.recurrence import AllReduce, State, Step, add


@dataclasses.dataclass(frozen=True)
class Desynced(Step):
    """A step on the rank's own stream. phase: sublayers since the last all-reduce."""

    phase: int = 0
    reduces: bool = True

    def wire(self, axes):
        return Desync(axes)


@dataclasses.dataclass(frozen=True)
class Silent(Step):
    """A step of the standard Transformer without its all-reduce: wrong numbers, for timing only."""

    reduces = False

    def wire(self, axes):
        return NoCommunication(axes)


@dataclasses.dataclass(frozen=True)
class Desync(AllReduce):
    """Between two all-reduces `State.carried` is the rank's own stream, `State.sums` the drift
    without `partial`.
    """

    def advance(self, state, step, sublayers):
        entered = state.carried
        if entered is None:
            entered = self.enter(step, state.residual, sublayers)
        partial = self.partial(step.sublayers, entered, sublayers)
        drift = state.partial
        if state.sums and state.sums[0] is not None:
            drift = state.sums[0] + drift
        if step.reduces:
            return State(add(state.residual, (self._synced(partial, drift),)))
        return State(state.residual, (drift,), partial, add(entered, (partial,)))

    def flush(self, state):
        """The stream of a model that ends here: its last step all-reduces."""
        if state.partial is None:
            return state.residual
        return add(state.residual, (self._synced(state.partial, state.sums[0]),))

    def _synced(self, partial, drift):
        return self.reduce(partial if drift is None else partial + drift / ranks(self.axes))


@dataclasses.dataclass(frozen=True)
class NoCommunication(AllReduce):
    """The residual is each rank's own."""

    def begin(self, x, first):
        return State(pvary(x, self.axes))

    def advance(self, state, step, sublayers):
        partial = self.partial(step.sublayers, state.residual, sublayers)
        return State(add(state.residual, (partial,)))
