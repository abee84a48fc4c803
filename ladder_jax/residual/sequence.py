"""Sequence parallelism: the topologies' steps on a stream that is split along the sequence over the tensor ranks.

The same recurrences as in steps.py. An all-reduce is a reduce-scatter and an all-gather (arXiv 2205.05198), and
between the two stand the addition to the stream and the next sublayer's normalisation, on a rank's own positions:

    launch   summed  = reduce_scatter(partial)                      of the sublayer before
             stream  = residual + summed
             entered = all_gather(normalise(stream))                the *next* sublayer's input
    compute  fresh   = sublayer(entered of the step before)         the overlap
    await    fresh, entered, stream = optimization_barrier((fresh, entered, stream))

so that in a Ladder both halves stand beside one sublayer. Normalisation is here without its gain, which the sublayer
multiplies its gathered input with: so a step needs none of the next layer's parameters.

A gather that no sublayer can hide (all of Standard's, a Ladder's first) and a scatter that is awaited at once (all of
Standard's, a Ladder's last) may be part of the matmuls that they feed or drain: a *collective matmul*. The sublayer
still communicates nothing. It reads this rank's positions, and multiplies by the `Projections` that the step gives it.
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.config import CollectiveMatmul, Launch
from ladder_jax.errors import UserError
from ladder_jax.parallel.collectives import (
    ENTER,
    FOLLOWING,
    LAUNCH,
    PREVIOUS,
    all_gather,
    pvary,
    ranks,
    reduce_scatter,
    varying,
)
from ladder_jax.residual.steps import REDUCED, Delayed, State, Sublayer, add, barrier_forward, check_axes, compute
from ladder_jax.residual.topologies import Topology

LENGTH = 1  # the dimension of [B, T, D] that is split

Normalise = Callable[[jax.Array], jax.Array]
Product = Callable[[jax.Array, Any], Any]  # (x [B, T, ...], weights) -> arrays [B, T, ...], position by position
Project = Callable[[Product, jax.Array, Any], Any]  # (product, x, weights) -> what `product` makes of them


@dataclasses.dataclass(frozen=True)
class Projections:
    """How a sublayer computes its first products, of its input, and its last one, which makes its output.

    into: also gathers the input, [B, T/ranks, D]. out: also sums over the ranks, and keeps [B, T/ranks, D]. None: the
        product of what this rank has.
    """

    into: Project | None = None
    out: Project | None = None


LOCAL = Projections()


class Prepared(enum.Enum):
    """What a step gathers for the step after it, whose input leaves out all that is pending."""

    NOTHING = "nothing"
    NORMALISED = "normalised"
    STREAM = "stream"  # a fresh ladder adds its partial before it is normalised

    @classmethod
    def for_step(cls, step: Delayed) -> "Prepared":
        if not step.reads_added:
            return cls.NOTHING
        return cls.STREAM if step.fresh else cls.NORMALISED


@dataclasses.dataclass(frozen=True)
class SequenceParallelStep:
    """A `Delayed` step where `State.residual` and `State.sums` are this rank's positions, [B, T/ranks, D].

    step: which outputs are pending before and after it, and which its input leaves out.
    normalise: applied to a sublayer's input before it is gathered; returns the compute dtype.
    prepares: what the step after it reads.
    """

    step: Delayed
    normalise: Normalise
    prepares: Prepared = Prepared.NOTHING
    collective_matmul: CollectiveMatmul = CollectiveMatmul.NONE

    def __call__(
        self,
        state: State,
        sublayers: Sequence[Sublayer],
        *,
        axes: tuple[str, ...],
        launch: Launch = Launch.CHAINED,
    ) -> State:
        check_axes(axes)
        step, stream, pending, entered = self.step, state.residual, state.partial, state.entered
        if step.early:
            entered = self._enter(stream, axes) if entered is None else entered
            pending = pending + compute(entered, step.early, sublayers, axes=axes)
        launched = (*state.sums, scatter(pending, axes, PREVIOUS)) if step.pending_before else ()
        projections = self._projections(axes, gathers=entered is None)
        if entered is None:
            read = add(stream, launched[: step.pending_before - step.delay])
            entered = self._enter(read, axes) if projections.into is None else self.normalise(read)
        if step.fresh:
            entered = self.normalise(add(entered, (state.partial,)))
        if projections == LOCAL:
            partial = compute(entered, step.sublayers, sublayers, axes=axes)
        else:
            (which,) = step.sublayers
            partial = sublayers[which](entered, projections)
        if step.pending_after == 0:
            summed = scatter(partial, axes) if projections.out is None else partial
            return State(add(stream, (*launched, summed)))
        added = step.pending_before + 1 - step.pending_after
        stream, sums = add(stream, launched[:added]), launched[added:]
        following = self._prepare(stream, axes)
        if ranks(axes) > 1:
            partial, following, stream = barrier_forward((partial, following, stream))
        return State(stream, sums, partial, entered=following)

    def fill(self, state: State, *, axes: tuple[str, ...], dtype: jnp.dtype) -> State:
        """`state` with zeros in place of None: a scan's carry has one structure from its first turn on."""
        if self.step.pending_before == 0:
            return state
        stream = state.residual
        if self.step.reads_added and state.entered is None:
            state = dataclasses.replace(state, entered=self._enter(stream, axes))
        rows, length, width = stream.shape
        zero = jnp.zeros((rows, length * ranks(axes), width), dtype)
        zero = pvary(zero, varying(stream) | frozenset(axes))
        sums = tuple(scatter(zero, axes) if s is None else s for s in state.sums)
        return dataclasses.replace(state, sums=sums, partial=zero if state.partial is None else state.partial)

    @property
    def sublayers(self) -> tuple[int, ...]:
        return self.step.sublayers

    def _projections(self, axes: tuple[str, ...], *, gathers: bool) -> Projections:
        """With collective matmuls: of an input that is gathered here, and of an output that is awaited here."""
        if self.collective_matmul is CollectiveMatmul.NONE:
            return LOCAL
        into, out = _gathered_product, _scattered_product
        if self.collective_matmul is CollectiveMatmul.RING:
            into, out = _ring_in, _ring_out
        into = functools.partial(into, axes=axes) if gathers and not self.step.fresh else None
        return Projections(into, functools.partial(out, axes=axes) if self.step.pending_after == 0 else None)

    def _enter(self, stream: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """This step's input [B, T, D], gathered; of a fresh ladder not normalised yet."""
        return gather(stream if self.step.fresh else self.normalise(stream), axes, "")

    def _prepare(self, stream: jax.Array, axes: tuple[str, ...]) -> jax.Array | None:
        """The next step's input [B, T, D], gathered."""
        if self.prepares is Prepared.NOTHING:
            return None
        return gather(stream if self.prepares is Prepared.STREAM else self.normalise(stream), axes, FOLLOWING)


def layers(
    topology: Topology, *, normalise: Normalise, collective_matmul: CollectiveMatmul = CollectiveMatmul.NONE
) -> tuple[tuple[SequenceParallelStep, ...], ...]:
    """`topology.layers` on a split stream. Raises UserError for topologies that do not reduce every output.

    With collective matmuls the last step awaits its own output, which has no later sublayer to hide under.
    """
    if not all(isinstance(step, Delayed) for steps in topology.layers for step in steps):
        raise UserError("sequence parallelism needs a residual that reduces every sublayer's output: not desync-n")
    of_layers = [list(steps) for steps in topology.layers]
    if collective_matmul is not CollectiveMatmul.NONE:
        of_layers[-1][-1] = dataclasses.replace(of_layers[-1][-1], pending_after=0)
    split = functools.partial(SequenceParallelStep, normalise=normalise, collective_matmul=collective_matmul)
    prepared = prepared_by(of_layers)
    return tuple(tuple(split(step, prepares=next(prepared)) for step in steps) for steps in of_layers)


def prepared_by(layers: Sequence[Sequence[Delayed]]) -> Iterator[Prepared]:
    """What each step prepares, in order.

    The last one as if another layer like its own came: a scan's layers are of equal steps.
    """
    steps = itertools.chain(*layers, layers[-1][:1])
    for step, after in itertools.pairwise(steps):
        yield Prepared.for_step(after) if step.pending_after else Prepared.NOTHING


def flush(state: State, *, axes: tuple[str, ...]) -> jax.Array:
    """This rank's positions of the final stream: everything still pending is reduced and added."""
    return add(state.residual, (*state.sums, scatter(state.partial, axes, PREVIOUS)))


def scatter(partial: jax.Array | None, axes: tuple[str, ...], scope: str = "") -> jax.Array | None:
    """The sum of every rank's [B, T, D], of which this rank gets its T/ranks positions."""
    if partial is None:
        return None
    with jax.named_scope(f"{LAUNCH}/{scope}" if scope else LAUNCH):
        return checkpoint_name(reduce_scatter(partial, axes, dimension=LENGTH), REDUCED)


def gather(stream: jax.Array, axes: tuple[str, ...], scope: str = FOLLOWING) -> jax.Array:
    """All ranks' positions [B, T, D]. Its transpose is the reduce-scatter of the gradient."""
    with jax.named_scope(f"{ENTER}/{scope}" if scope else ENTER):
        return all_gather(stream, axes, dimension=LENGTH)


def scatter_sequence(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """This rank's positions of the sum of every rank's [B, T, D]: where a split stream begins."""
    return reduce_scatter(x, axes, dimension=LENGTH)


def _gathered_product(product: Product, x: jax.Array, weights: Any, *, axes: tuple[str, ...]) -> Any:
    return product(gather(x, axes, ""), weights)


def _scattered_product(product: Product, x: jax.Array, weights: Any, *, axes: tuple[str, ...]) -> jax.Array:
    return scatter(product(x, weights), axes)


def _ring_in(product: Product, x: jax.Array, weights: Any, *, axes: tuple[str, ...]) -> Any:
    from ladder_jax.parallel import ring

    with jax.named_scope(ENTER):
        return ring.gather_product(product, x, weights, axes)


def _ring_out(product: Product, x: jax.Array, weights: Any, *, axes: tuple[str, ...]) -> jax.Array:
    from ladder_jax.parallel import ring

    with jax.named_scope(LAUNCH):
        return checkpoint_name(ring.scatter_product(product, x, weights, axes), REDUCED)
