"""Sequence parallelism: the wire of a stream that is split along the sequence over the tensor
ranks.

An all-reduce is a reduce-scatter and an all-gather (arXiv 2205.05198), and between the two stand
the addition to the stream and the next sublayer's normalisation, on a rank's own positions:

    launch   summed  = reduce_scatter(partial)                      of the sublayer before
             stream  = residual + summed
             entered = all_gather(normalise(stream))                the *next* sublayer's input
    compute  fresh   = sublayer(entered of the step before)         the overlap
    await    fresh, entered, stream = optimization_barrier((fresh, entered, stream))

so that in a Ladder both halves stand beside one sublayer. Normalisation is here without its gain,
which the sublayer multiplies its gathered input with: so a step needs none of the next layer's
parameters.

A gather that no sublayer can hide (all of Standard's, a Ladder's first) and a scatter that is
awaited at once (all of Standard's, a Ladder's last) may be part of the matmuls that they feed or
drain: a *collective matmul*. The sublayer still communicates nothing. It reads this rank's
positions, and multiplies by the `Projections` that the step gives it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.errors import UserError
from ladder_jax.parallel.collectives import (
    Axes,
    all_gather,
    named,
    pvary,
    ranks,
    reduce_scatter,
)
from ladder_jax.residual.recurrence import (
    LOCAL,
    REDUCED,
    AllReduce,
    Product,
    Projections,
    State,
    Step,
    add,
    barrier_backward,
    barrier_forward,
    local,
    with_next,
)
from ladder_jax.scopes import ENTER, FOLLOWING, LAUNCH, PREVIOUS

LENGTH = 1  # the dimension of [B, T, D] that is split

Normalise = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class SplitStep(Step):
    """A step that knows what the step after it reads.

    prepares: whether it gathers that step's input, which leaves out all that is pending.
        before_fresh: whether that is a fresh ladder's, which adds its partial before it is
        normalised.
    """

    prepares: bool = False
    before_fresh: bool = False


@dataclasses.dataclass
class Beside:
    """The two messages beside one sublayer: an output that arrives, and the input that it makes
    ready.

    newest: the output on its way, or None. settle: from that, arrived, to a state. make: from the
    state to what is sent. send: from that to the input.
    """

    newest: Any
    settle: Callable[..., State]
    make: Callable
    send: Callable

    def between(self, product: Product, x: Array, weights: Any) -> Any:
        """The sublayer's first products: the first message is awaited after them, and the second
        one sent.
        """
        products = product(x, weights)
        newest = self.newest
        if newest is not None:
            products, newest = barrier_forward((products, newest))
        self.state = self.settle(newest)
        self.made = self.make(self.state)
        if self.made is not None:
            products, self.made = barrier_backward((products, self.made))
        return products

    def after(self, output: Any) -> tuple[Any, State]:
        """The sublayer's output, and the state with the input that has arrived beside it."""
        following = None if self.made is None else self.send(self.made)
        arrived = barrier_forward((output, following, self.state.residual))
        output, following, stream = barrier_backward(arrived)
        return output, dataclasses.replace(self.state, residual=stream, carried=following)


@dataclasses.dataclass(frozen=True)
class SequenceParallel(AllReduce):
    """`State.residual` and `sums` are this rank's positions, [B, T/ranks, D]; `carried` is the next
    step's input.

    normalise: applied to a sublayer's input before it is gathered; returns the compute dtype.
    rings: whether its matmuls are collective.
    """

    normalise: Normalise
    rings: bool = False

    def layers(self, layers):
        """Raises UserError for topologies that do not reduce every output.

        With collective matmuls the last step awaits its own output, which has no later sublayer to
        hide under.
        """
        if not all(step.reduces for steps in layers for step in steps):
            raise UserError(
                "sequence parallelism needs a residual that reduces every output: not desync-n, nor no-communication"
            )
        *others, last = layers
        if self.rings:
            last = (*last[:-1], dataclasses.replace(last[-1], pending_after=0))

        def split(step, after):
            prepares = step.pending_after > 0 and after.reads_added
            before_fresh = prepares and after.fresh
            return SplitStep(**vars(step), prepares=prepares, before_fresh=before_fresh)

        return with_next([*others, last], split)

    def launch(self, step, pending, residual, scope=PREVIOUS):
        return self.reduce(pending, scope)

    def reduce(self, partial, scope=""):
        return scatter(partial, self.axes, scope)

    def enter(self, step, stream, sublayers):
        """The step's input, gathered, or left to its projection; of a fresh ladder not normalised
        yet.
        """
        if self._gathers_in_matmul(step):
            return self.normalise(stream)
        return self._sent(self._made(step.sublayers, stream, sublayers, fresh=step.fresh), "")

    def with_own(self, entered, partial):
        return self.normalise(add(entered, (partial,)))

    def normed(self, sublayer, entered):
        return sublayer.gained(entered)

    def advance(self, state, step, sublayers):
        entered, launched = self.entered(state, step, sublayers)
        if step.fresh:
            entered = self.with_own(entered, state.partial)
        projections = self._projections(step, gathers=state.carried is None)
        if projections == LOCAL:
            partial = self.partial(step.sublayers, entered, sublayers)
        else:
            partial = self._projected(step, entered, sublayers, projections)
        if step.pending_after == 0:
            summed = self.reduce(partial) if projections.out is local else partial
            return State(add(state.residual, (*launched, summed)))
        stream, sums = step.settle(state.residual, launched)
        following = None
        if step.prepares:
            made = self._made((), stream, sublayers, fresh=step.before_fresh)
            following = self._sent(made, FOLLOWING)
        partial, following, stream = barrier_forward((partial, following, stream))
        return State(stream, sums, partial, following)

    def fill(self, state, steps, *, dtype):
        if steps[0].reads_added and state.carried is None:
            state = self.prepare(steps[0], state, "")
        return super().fill(state, steps, dtype=dtype)

    def filled(self, stream, sums, partial, dtype):
        rows, length, width = stream.shape
        zero = jnp.zeros_like(stream, dtype, (rows, length * ranks(self.axes), width))
        zero = pvary(zero, self.axes)
        sums = tuple(self.reduce(zero) if one is None else one for one in sums)
        return sums, zero if partial is None else partial

    def turn(self, step, entered, sublayers, *, own, other):
        """The scatter beside a sublayer's first products, the gather beside the rest; of two
        sublayers beside both.
        """
        if len(step.sublayers) > 1 or not sublayers[step.sublayers[0]].projects:
            partial, residual, (newest,) = self.output(
                step,
                entered,
                own,
                sublayers,
                other.state.residual,
                (other.launched,),
                forward=False,
            )
            arrived = self.prepare(other.after, other.settled(residual, newest), other.into)
            return barrier_forward((partial, arrived))
        if step.fresh:
            entered = self.with_own(entered, own)
        return self.turn_beside(step, entered, sublayers, other)

    def turn_beside(self, step, entered, sublayers, other):
        after = other.after

        def settle(newest):
            return other.settled(
                other.state.residual, self._arrived(newest, like=other.state.residual)
            )

        def make(state):
            return self._made_for(after, state, other.sublayers)

        def send(made):
            return self._sent(made, other.into)

        beside = Beside(other.launched, settle=settle, make=make, send=send)
        return beside.after(self._output(step, entered, sublayers, beside))

    def prepare(self, after, state, scope):
        made = self._made_for(after, state, ())
        return dataclasses.replace(state, carried=self._sent(made, scope))

    def _made_for(self, after, state, sublayers):
        """What is sent for the step `after`, of the outputs that its input holds."""
        stream = add(state.residual, after.read(state.sums))
        return self._made(after.sublayers, stream, sublayers, fresh=after.fresh)

    def _arrived(self, newest, *, like):
        """[B, T/ranks, D], the shape of `like`: the output that has arrived."""
        return newest

    def _made(self, which, stream, sublayers, *, fresh=False):
        """This rank's positions of the input of `which` sublayer; of a fresh ladder not normalised
        yet, as its partial is still missing.
        """
        return stream if fresh else self.normalise(stream)

    def _sent(self, made, scope):
        """The input of a sublayer, from all ranks."""
        return gather(made, self.axes, scope)

    def _output(self, step, entered, sublayers, beside):
        """The sublayer's partial sum, with two messages beside it."""
        return self._projected(step, entered, sublayers, Projections(beside.between))

    def _projected(self, step, entered, sublayers, projections):
        (which,) = step.sublayers
        sublayer = sublayers[which]
        return sublayer.function(sublayer.gained(entered), projections=projections)

    def _gathers_in_matmul(self, step):
        return self.rings and not step.fresh

    def _projections(self, step, *, gathers):
        """With collective matmuls: of an input that is gathered here, and of an output that is
        awaited here.
        """
        gathers = gathers and self._gathers_in_matmul(step)
        scatters = self.rings and step.pending_after == 0
        return Projections(
            functools.partial(_ring_in, axes=self.axes) if gathers else local,
            functools.partial(_ring_out, axes=self.axes) if scatters else local,
        )


def scatter(partial: Array | None, axes: Axes, scope: str = "") -> Array | None:
    """The sum of every rank's [B, T, D], of which this rank gets its T/ranks positions."""
    if partial is None:
        return None
    with named(LAUNCH, scope):
        return checkpoint_name(reduce_scatter(partial, axes, dimension=LENGTH), REDUCED)


def gather(stream: Array, axes: Axes, scope: str = FOLLOWING) -> Array:
    """All ranks' positions [B, T, D]. Its transpose is the reduce-scatter of the gradient."""
    with named(ENTER, scope):
        return all_gather(stream, axes, dimension=LENGTH)


def scatter_sequence(x: Array, axes: Axes) -> Array:
    """This rank's positions of the sum of every rank's [B, T, D]: where a split stream begins."""
    return reduce_scatter(x, axes, dimension=LENGTH)


def _ring_in(product, x, weights, *, axes):
    from ladder_jax.parallel import ring

    with jax.named_scope(ENTER):
        return ring.gather_product(product, x, weights, axes)


def _ring_out(product, x, weights, *, axes):
    from ladder_jax.parallel import ring

    with jax.named_scope(LAUNCH):
        return checkpoint_name(ring.scatter_product(product, x, weights, axes), REDUCED)
