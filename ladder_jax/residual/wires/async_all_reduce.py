"""All-reduces that are started and awaited apart, for prefill and decode: a whole sublayer stands
between.

A compiler makes such pairs of its own, too, but leaves only as much compute between them as its
estimate of the transfer demands. Started collectives have no gradient, so training has `AllReduce`.
"""

import dataclasses

from jax import lax

from ladder_jax.parallel import start_all_reduce
from ladder_jax.parallel.collectives import named, opaque_copy
from ladder_jax.residual.recurrence import AllReduce, Normed
from ladder_jax.scopes import LAUNCH, PREVIOUS


@dataclasses.dataclass(frozen=True)
class AsyncAllReduce(AllReduce):
    """A step whose input leaves the newest output out starts its all-reduce, computes, and awaits
    it.
    """

    def advance(self, state, step, sublayers):
        wire = self.beside(step, sublayers)
        if not step.delay or state.partial is None or wire is not self:
            return AllReduce(self.axes).advance(state, step, sublayers)
        return super().advance(state, step, sublayers)

    def beside(self, step, sublayers):
        """Compilers fail where a sublayer communicates while a started all-reduce is awaited after
        it.
        """
        communicates = any(
            getattr(sublayers[index], "communicates", False) for index in step.sublayers
        )
        return AllReduce(self.axes) if communicates else self

    def launch(self, step, pending, residual, scope=PREVIOUS):
        if pending is None:
            return None
        pending = opaque_copy(pending, self.axes) if step.fresh else pending
        with named(LAUNCH, scope):
            return start_all_reduce(pending, self.axes)

    def output(self, step, entered, own, sublayers, residual, launched, *, scope=PREVIOUS, **ties):
        *older, started = launched
        if started is None:
            return super().output(
                step,
                entered,
                own,
                sublayers,
                residual,
                launched,
                backward=False,
                forward=False,
            )
        if step.fresh:
            entered = self.with_own(entered, own)
        entered, sublayers, started = _after(started, step, entered, sublayers)
        partial = self.partial(step.sublayers, entered, sublayers)
        partial, started = lax.optimization_barrier((partial, started))
        with named(LAUNCH, scope):  # a TPU's compiler keeps this name for both halves
            summed = started.done()
        # the next one starts later, because compilers for TPUs refuse two in flight
        partial, summed = lax.optimization_barrier((partial, summed))
        return partial, residual, (*older, summed)


def _after(started, step, entered, sublayers):
    """(the input, the sublayers, what was started), of which the sublayers are computed after the
    start.

    They wait by their gains, which are small; plain functions by their input, which then cannot be
    fused with what precedes it.
    """
    if not all(isinstance(sublayers[index], Normed) for index in step.sublayers):
        entered, started = lax.optimization_barrier((entered, started))
        return entered, sublayers, started
    gains = {index: sublayers[index].gain for index in step.sublayers}
    gains, started = lax.optimization_barrier((gains, started))
    held = list(sublayers)
    for index, gain in gains.items():
        held[index] = dataclasses.replace(held[index], gain=gain)
    return entered, held, started
