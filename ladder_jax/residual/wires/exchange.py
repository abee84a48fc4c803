"""Experts whose rows are exchanged: the topologies' steps on a split stream, with two all-to-alls a layer.

Attention is as in sequence.py: its input is gathered over the tensor ranks, its output reduce-scattered. The routed
experts of a layer read a rank's own positions and send each row to the rank of its expert and back (parallel/
exchange.py), so what they return is whole. In a Ladder both all-to-alls stand beside attention, and both of attention's
collectives beside the experts, each beside one half:

    attention of layer k   combine          the rows of layer k-1's experts      beside its first products
                           stream           + their weighted sums
                           dispatch         layer k's rows, of that stream       beside its scores and its last product
    experts of layer k     reduce_scatter   attention's output                   beside their first products
                           all_gather       the next attention's input           beside their last product

The backward pass takes the steps in reverse, each message by its transpose: dispatch beside attention's last product
and scores, combine beside its first products; all_gather beside the experts' last product, reduce_scatter beside their
first.

Barriers tie what arrives in each half to the half's products, in both directions. Without them a compiler for TPUs
awaits each all-to-all where it has issued it, and one for GPUs leaves the reduce-scatters nothing.

A shared expert stays tensor-parallel: its input is gathered, and its partial sum reduce-scattered with attention's
("farskip"), or on its own. In a standard layer it is all that the all-to-alls can stand beside, each beside one half.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.config import MoEConfig
from ladder_jax.parallel import exchange
from ladder_jax.parallel.collectives import ENTER, FOLLOWING, LAUNCH, PREVIOUS, Axes, named, pvary, ranks, varying
from ladder_jax.residual.loop import EXCHANGED
from ladder_jax.residual.recurrence import (
    REDUCED,
    AllReduce,
    Projections,
    State,
    add,
    barrier_backward,
    barrier_forward,
    project,
)
from ladder_jax.residual.wires.sequence import (
    Normalise,
    Prepared,
    SplitStep,
    check_reduces,
    gather,
    of_normalised,
    prepared_by,
    scatter,
)

ATTENTION, EXPERTS = 0, 1  # of a layer's sublayers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routed:
    """Rows between two steps: a state's `carried` before its experts, its `partial` after them.

    rows: [E/ranks, ranks S, D], of this rank's experts; after them [ranks S, E/ranks, D], their outputs.
    places, weights: float32 [N, K], of the outputs of this rank's tokens, once they are combined.
    shared: of the shared expert, if there is one, the input [B, T, D], later the partial sum; or what of it is this
        rank's, summed.
    """

    rows: Array
    places: Array
    weights: Array
    shared: Array | None


@dataclasses.dataclass(frozen=True)
class ExchangeStep(SplitStep):
    """shared_before: of attention, whether the experts before it leave the shared expert's partial sum, too."""

    shared_before: bool = False

    @property
    def is_attention(self) -> bool:
        return self.sublayers == (ATTENTION,)


@dataclasses.dataclass(frozen=True)
class Exchange(AllReduce):
    """Residual and sums are this rank's positions, [B, T/ranks, D]. For topologies that `check_exchange` allows.

    normalise: as in `SequenceParallel`. Its sublayers are attention and the experts, an `nn.experts.NormedExperts`.
    """

    normalise: Normalise
    moe: MoEConfig

    def layers(self, layers):
        check_reduces(layers)
        result = []
        shared_before = None
        prepared = prepared_by(layers)
        for attention, experts in layers:
            leaves = bool(self.moe.shared_width and experts.pending_after and not experts.early)
            before = leaves if shared_before is None else shared_before
            of_attention = ExchangeStep(**vars(attention), prepares=next(prepared), shared_before=before)
            result.append((of_attention, ExchangeStep(**vars(experts), prepares=next(prepared))))
            shared_before = leaves
        return tuple(result)

    def launch(self, step, pending, residual):
        if not step.is_attention:
            return scatter(pending, self.axes, PREVIOUS)
        arriving = combine(pending, self.axes)
        return arriving if step.delay else collect(arriving, like=residual)

    def enter(self, step, stream, sublayers):
        if step.is_attention:
            return gather(self.normalise(stream), self.axes, "")
        return self._dispatch(step, self._fill(stream, sublayers))

    def partial(self, which, entered, sublayers):
        """Of the one sublayer that runs early, the shared expert."""
        return sublayers[EXPERTS].shared(entered.shared)

    def compute(self, step, state, entered, launched, sublayers):
        of_kind = self._attention if step.is_attention else self._experts
        return of_kind(step, state.residual, entered, launched, sublayers)

    def _attention(self, step, stream, entered, launched, sublayers):
        sums = ()
        following = None

        def between(product, x, weights):  # the two all-to-alls
            nonlocal stream, launched, sums, following
            products = product(x, weights)
            if launched and isinstance(launched[-1], Routed):
                products, arrived = barrier_forward((products, launched[-1]))
                launched = (*launched[:-1], collect(arrived, like=stream))
            if step.pending_after:
                stream, sums = step.settle(stream, launched)
                if step.prepares is not Prepared.NOTHING:
                    following = self._fill(stream, sublayers)
                products, following = barrier_backward((products, following))
            return products

        partial = of_normalised(sublayers[ATTENTION])(entered, projections=Projections(project(between)))
        if step.pending_after == 0:
            return State(add(stream, (*launched, scatter(partial, self.axes))))
        following = following and self._dispatch(step, following, FOLLOWING)
        partial, following, stream = barrier_both((partial, following, stream))
        return State(stream, sums, partial, following)

    def _experts(self, step, stream, entered, launched, sublayers):
        parts = sublayers[EXPERTS]
        sums = ()
        following = None

        def between(products):  # the reduce-scatter and the all-gather
            nonlocal stream, launched, sums, following
            if step.pending_after == 0:
                return products
            if launched:
                products, newest = barrier_forward((products, launched[-1]))
                launched = (*launched[:-1], newest)
            stream, sums = step.settle(stream, launched)
            if step.prepares is not Prepared.NOTHING:
                following = self.normalise(stream)
            products, following = barrier_backward((products, following))
            return products

        shared = None
        rows = entered.rows
        if entered.shared is not None and not step.early:

            def with_rows(products):
                nonlocal rows
                products, rows = barrier_forward((products, rows)) if step.delay == 0 else (products, rows)
                return products

            shared = parts.shared(entered.shared, with_rows)
        rows = parts.compute(rows, between)
        fresh = dataclasses.replace(entered, rows=rows, shared=shared)
        if step.pending_after == 0:
            arrived = combine(fresh, self.axes, "", shared_last=True)
            return State(add(stream, (*launched, collect(arrived, like=stream))))
        if following is not None:
            following = gather(following, self.axes, FOLLOWING)
        fresh, following, stream = barrier_both((fresh, following, stream))
        return State(stream, sums, fresh, following)

    def fill(self, state, steps, *, dtype):
        first = steps[0]
        if first.pending_before == 0:
            return state
        stream = state.residual
        carried = state.carried
        partial = state.partial
        if first.reads_added and carried is None:
            carried = gather(self.normalise(stream), self.axes, "")

        def zero(shape, dtype):
            return pvary(jnp.zeros(shape, dtype), varying(stream) | frozenset(self.axes))

        sums = tuple(zero(stream.shape, dtype) if one is None else one for one in state.sums)
        if partial is None:
            tokens = stream.shape[0] * stream.shape[1]
            count = ranks(self.axes)
            experts = self.moe.padded(count)
            size = self.moe.slots(tokens)
            choices = zero((tokens, self.moe.top_k), jnp.float32)
            rows = zero((count * size, experts // count, stream.shape[2]), dtype)
            whole = stream.shape[0], stream.shape[1] * count, stream.shape[2]
            partial = Routed(rows, choices, choices, zero(whole, dtype) if first.shared_before else None)
        return State(stream, sums, partial, carried)

    def flush(self, state):
        newest = collect(combine(state.partial, self.axes), like=state.residual)
        return add(state.residual, (*state.sums, newest))

    def _fill(self, stream, sublayers):
        """Of the experts' input: this rank's tokens in buffers [E, S, D], and for the shared expert [B, T/ranks, D]."""
        x = self.normalise(stream)
        count = ranks(self.axes)
        tokens, slots, weights = sublayers[EXPERTS].route(x)
        experts = self.moe.padded(count)
        size = self.moe.slots(len(tokens))
        places = exchange.places(slots, experts=experts, size=size, count=count)
        buffers = exchange.fill(tokens, slots, experts=experts, size=size)
        return Routed(buffers, places, weights, x if self.moe.shared_width else None)

    def _dispatch(self, step, filled, scope=""):
        """The rows of all ranks' tokens for this rank's experts, and the shared expert's whole input."""
        buffers = filled.rows
        shared = filled.shared
        shared = None if shared is None else gather(shared, self.axes, scope)
        if step.delay == 0 and shared is not None:
            buffers, shared = barrier_forward((buffers, shared))  # first what the shared expert waits for
        with named(ENTER, scope):
            rows = exchange.dispatch(buffers, axes=self.axes)
        return dataclasses.replace(filled, rows=checkpoint_name(rows, EXCHANGED), shared=shared)


@dataclasses.dataclass(frozen=True)
class SilentExchange(Exchange):
    """Of "no-communication": a standard step that computes as much and sends nothing. Only its time means something."""

    def layers(self, layers):
        return tuple(layers)

    def advance(self, state, step, sublayers):
        stream = state.residual
        count = ranks(self.axes)
        own = slice(stream.shape[1])
        x = self.normalise(stream)
        whole = jnp.tile(x, (1, count, 1))
        if step.sublayers == (ATTENTION,):
            return State(add(stream, (of_normalised(sublayers[ATTENTION])(whole)[:, own],)))
        parts = sublayers[EXPERTS]
        tokens, slots, weights = parts.route(x)
        sizes = dict(experts=self.moe.padded(count), size=self.moe.slots(len(tokens)))
        buffers = exchange.fill(tokens, slots, **sizes)
        rows = parts.compute(buffers.reshape(-1, count * buffers.shape[1], buffers.shape[2]))
        shared = parts.shared(whole)[:, own] if self.moe.shared_width else None
        arrived = Routed(rows, exchange.places(slots, **sizes, count=count), weights, shared)
        return State(add(stream, (collect(arrived, like=stream),)))


def combine(partial: Routed | None, axes: Axes, scope: str = PREVIOUS, *, shared_last: bool = False) -> Routed | None:
    """Computed rows on the ranks of their tokens, and this rank's positions of the shared expert's sum.

    shared_last: it is reduce-scattered after the rows have arrived, beside which its last product can be.
    """
    if partial is None:
        return None
    with named(LAUNCH, scope):
        rows = checkpoint_name(exchange.combine(partial.rows, axes=axes), EXCHANGED)
    shared = partial.shared
    if shared_last and shared is not None:
        shared, rows = barrier_forward((shared, rows))
    return dataclasses.replace(partial, rows=rows, shared=scatter(shared, axes, scope))


def collect(arrived: Routed | None, *, like: Array) -> Array | None:
    """[B, T/ranks, D], the shape of `like`: the experts' output for this rank's positions, whole."""
    if arrived is None:
        return None
    out = exchange.collect(arrived.rows, arrived.places, arrived.weights).reshape(like.shape)
    return checkpoint_name(out if arrived.shared is None else out + arrived.shared, REDUCED)


def barrier_both(arrays: Any) -> Any:
    """`optimization_barrier` in both directions."""
    return barrier_backward(barrier_forward(arrays))
