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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.config import Launch, MoEConfig
from ladder_jax.parallel import exchange
from ladder_jax.parallel.collectives import ENTER, FOLLOWING, LAUNCH, PREVIOUS, check_axes, pvary, ranks, varying
from ladder_jax.residual.farskip import ROUTED, SHARED
from ladder_jax.residual.layers import EXCHANGED
from ladder_jax.residual.sequence import Normalise, Prepared, Projections, gather, prepared_by, scatter
from ladder_jax.residual.steps import REDUCED, Delayed, State, add, barrier_backward, barrier_forward
from ladder_jax.residual.topologies import Communication, Topology

ATTENTION = 0


@dataclasses.dataclass(frozen=True)
class RoutedExperts:
    """A layer's routed experts as two functions of one rank.

    route: a normalised input, this rank's positions [B, T, D], to (its tokens with the norm's gain [N, D], their slots
        int32 [N, K] as `parallel.exchange.slots`, the weights of their rows float32 [N, K]).
    compute: the rows [E/ranks, R, D] of this rank's experts to their outputs [R, E/ranks, D], the order in which they
        are sent; its second argument is applied to their first products.
    """

    route: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
    compute: Callable[..., jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routed:
    """Rows between two steps: a state's `entered` before its experts, its `partial` after them.

    rows: [E/ranks, ranks S, D], of this rank's experts; after them [ranks S, E/ranks, D], their outputs.
    places, weights: float32 [N, K], of the outputs of this rank's tokens, once they are combined.
    shared: of the shared expert, if there is one, the input [B, T, D], later the partial sum; or what of it is this
        rank's, summed.
    """

    rows: jax.Array
    places: jax.Array
    weights: jax.Array
    shared: jax.Array | None


@dataclasses.dataclass(frozen=True)
class ExchangeStep:
    """A `Delayed` step of attention or of experts, where residual and sums are this rank's positions, [B, T/ranks, D].

    normalise: as in `SequenceParallelStep`.
    prepares: what the step after it reads.
    shared_before: of attention, whether the experts before it leave the shared expert's partial sum, too.
    """

    step: Delayed
    normalise: Normalise
    moe: MoEConfig
    prepares: Prepared = Prepared.NOTHING
    shared_before: bool = False

    def __call__(
        self, state: State, sublayers: Sequence[Any], *, axes: tuple[str, ...], launch: Launch = Launch.CHAINED
    ) -> State:
        """sublayers: (attention, `RoutedExperts`, the shared expert or None)."""
        check_axes(axes)
        compute = self._attention if self.step.sublayers == (ATTENTION,) else self._experts
        return compute(state, sublayers, axes)

    def _attention(self, state: State, sublayers: Sequence[Any], axes: tuple[str, ...]) -> State:
        step, stream, sums, newest, following = self.step, state.residual, state.sums, None, None
        arriving = combine(state.partial, axes) if step.pending_before else None
        if arriving is not None and not step.delay:
            newest, arriving = collect(arriving, like=stream), None
        entered = state.entered
        if entered is None:
            read = (*sums, newest)[: step.pending_before - step.delay]
            entered = gather(self.normalise(add(stream, read)), axes, "")

        def between(product, x, weights):  # the two all-to-alls
            nonlocal stream, sums, newest, following
            products = product(x, weights)
            if arriving is not None:
                products, arrived = barrier_forward((products, arriving))
                newest = collect(arrived, like=stream)
            if step.pending_after:
                stream, sums = self._added(stream, (*sums, newest) if step.pending_before else ())
                if self.prepares is not Prepared.NOTHING:
                    following = self._fill(stream, sublayers, axes)
                products, following = barrier_backward((products, following))
            return products

        partial = sublayers[ATTENTION](entered, Projections(into=between))
        if step.pending_after == 0:
            launched = (*sums, newest) if step.pending_before else ()
            return State(add(stream, (*launched, scatter(partial, axes))))
        following = following and self._dispatch(following, axes, FOLLOWING)
        partial, following, stream = barrier_both((partial, following, stream))
        return State(stream, sums, partial, entered=following)

    def _experts(self, state: State, sublayers: Sequence[Any], axes: tuple[str, ...]) -> State:
        step, stream, pending, following = self.step, state.residual, state.partial, None
        entered = state.entered
        if step.early:
            pending = pending + sublayers[SHARED](entered.shared)
        sums = (*state.sums, scatter(pending, axes, PREVIOUS)) if step.pending_before else ()
        if entered is None:
            read = self._fill(add(stream, sums[: step.pending_before - step.delay]), sublayers, axes)
            entered = self._dispatch(read, axes)

        def between(products):  # the reduce-scatter and the all-gather
            nonlocal stream, sums, following
            if step.pending_after == 0:
                return products
            if sums:
                products, newest = barrier_forward((products, sums[-1]))
                sums = (*sums[:-1], newest)
            stream, sums = self._added(stream, sums)
            if self.prepares is not Prepared.NOTHING:
                following = self.normalise(stream)
            products, following = barrier_backward((products, following))
            return products

        shared, rows = None, entered.rows
        if entered.shared is not None and not step.early:

            def with_rows(products):
                nonlocal rows
                products, rows = barrier_forward((products, rows)) if step.delay == 0 else (products, rows)
                return products

            shared = sublayers[SHARED](entered.shared, with_rows)
        rows = sublayers[ROUTED].compute(rows, between)
        fresh = dataclasses.replace(entered, rows=rows, shared=shared)
        if step.pending_after == 0:
            arrived = combine(fresh, axes, "", shared_last=True)
            return State(add(stream, (*sums, collect(arrived, like=stream))))
        if following is not None:
            following = gather(following, axes, FOLLOWING)
        fresh, following, stream = barrier_both((fresh, following, stream))
        return State(stream, sums, fresh, entered=following)

    def _added(self, stream: jax.Array, launched: tuple[jax.Array | None, ...]) -> tuple[jax.Array, tuple]:
        """The stream with the oldest of `launched`, and those that stay outside of it after this step."""
        count = self.step.pending_before + 1 - self.step.pending_after
        return add(stream, launched[:count]), launched[count:]

    def fill(self, state: State, *, axes: tuple[str, ...], dtype: jnp.dtype) -> State:
        """`state` with zeros in place of None: a scan's carry has one structure from its first turn on."""
        if self.step.pending_before == 0:
            return state
        stream = state.residual
        if self.step.reads_added and state.entered is None:
            state = dataclasses.replace(state, entered=gather(self.normalise(stream), axes, ""))
        zero = lambda shape, dtype: pvary(jnp.zeros(shape, dtype), varying(stream) | frozenset(axes))
        sums = tuple(zero(stream.shape, dtype) if s is None else s for s in state.sums)
        partial = state.partial
        if partial is None:
            tokens, count = stream.shape[0] * stream.shape[1], ranks(axes)
            experts, size = self.moe.padded(count), self.moe.slots(tokens)
            choices = zero((tokens, self.moe.top_k), jnp.float32)
            rows = zero((count * size, experts // count, stream.shape[2]), dtype)
            whole = stream.shape[0], stream.shape[1] * count, stream.shape[2]
            shared = zero(whole, dtype) if self.shared_before else None
            partial = Routed(rows, choices, choices, shared)
        return dataclasses.replace(state, sums=sums, partial=partial)

    @property
    def sublayers(self) -> tuple[int, ...]:
        return self.step.sublayers

    def _fill(self, stream: jax.Array, sublayers: Sequence[Any], axes: tuple[str, ...]) -> Routed:
        """Of the experts' input: this rank's tokens in buffers [E, S, D], and for the shared expert [B, T/ranks, D]."""
        x = self.normalise(stream)
        tokens, slots, weights = sublayers[ROUTED].route(x)
        experts, size = self.moe.padded(ranks(axes)), self.moe.slots(len(tokens))
        places = exchange.places(slots, experts=experts, size=size, count=ranks(axes))
        buffers = exchange.fill(tokens, slots, experts=experts, size=size)
        return Routed(buffers, places, weights, x if self.moe.shared_width else None)

    def _dispatch(self, filled: Routed, axes: tuple[str, ...], scope: str = "") -> Routed:
        """The rows of all ranks' tokens for this rank's experts, and the shared expert's whole input."""
        buffers, shared = filled.rows, filled.shared
        shared = None if shared is None else gather(shared, axes, scope)
        if self.step.delay == 0 and shared is not None:
            buffers, shared = barrier_forward((buffers, shared))  # first what the shared expert waits for
        with jax.named_scope(f"{ENTER}/{scope}" if scope else ENTER):
            rows = exchange.dispatch(buffers, axes=axes)
        return dataclasses.replace(filled, rows=checkpoint_name(rows, EXCHANGED), shared=shared)


@dataclasses.dataclass(frozen=True)
class SilentStep:
    """Of "no-communication": a standard step that computes as much and sends nothing. Only its time means something."""

    sublayers: tuple[int, ...]
    normalise: Normalise
    moe: MoEConfig

    def __call__(self, state: State, sublayers: Sequence[Any], *, axes: tuple[str, ...], **_) -> State:
        stream, count = state.residual, ranks(axes)
        own, x = slice(stream.shape[1]), self.normalise(stream)
        whole = jnp.tile(x, (1, count, 1))
        if self.sublayers == (ATTENTION,):
            return State(add(stream, (sublayers[ATTENTION](whole)[:, own],)))
        tokens, slots, weights = sublayers[ROUTED].route(x)
        sizes = dict(experts=self.moe.padded(count), size=self.moe.slots(len(tokens)))
        buffers = exchange.fill(tokens, slots, **sizes)
        rows = sublayers[ROUTED].compute(buffers.reshape(-1, count * buffers.shape[1], buffers.shape[2]))
        shared = sublayers[SHARED](whole)[:, own] if self.moe.shared_width else None
        arrived = Routed(rows, exchange.places(slots, **sizes, count=count), weights, shared)
        return State(add(stream, (collect(arrived, like=stream),)))

    def fill(self, state: State, *, axes: tuple[str, ...], dtype: jnp.dtype) -> State:
        return state


def layers(topology: Topology, *, normalise: Normalise, moe: MoEConfig) -> tuple[tuple[Any, ...], ...]:
    """`topology.layers` with exchanged experts on a split stream. The topology is one that `check_exchange` allows."""
    if topology.communication is Communication.NONE:
        return tuple(tuple(SilentStep(s.sublayers, normalise, moe) for s in steps) for steps in topology.layers)
    result, before, prepared = [], None, prepared_by(topology.layers)
    for attention, experts in topology.layers:
        leaves = bool(moe.shared_width and experts.pending_after and not experts.early)
        shared_before = leaves if before is None else before
        of_attention = ExchangeStep(attention, normalise, moe, next(prepared), shared_before)
        result.append((of_attention, ExchangeStep(experts, normalise, moe, next(prepared))))
        before = leaves
    return tuple(result)


def flush(state: State, *, axes: tuple[str, ...]) -> jax.Array:
    """This rank's positions of the final stream: everything still pending is added."""
    newest = collect(combine(state.partial, axes), like=state.residual)
    return add(state.residual, (*state.sums, newest))


def combine(
    partial: Routed | None, axes: tuple[str, ...], scope: str = PREVIOUS, *, shared_last: bool = False
) -> Routed | None:
    """Computed rows on the ranks of their tokens, and this rank's positions of the shared expert's sum.

    shared_last: it is reduce-scattered after the rows have arrived, beside which its last product can be.
    """
    if partial is None:
        return None
    with jax.named_scope(f"{LAUNCH}/{scope}" if scope else LAUNCH):
        rows = checkpoint_name(exchange.combine(partial.rows, axes=axes), EXCHANGED)
    shared = partial.shared
    if shared_last and shared is not None:
        shared, rows = barrier_forward((shared, rows))
    return dataclasses.replace(partial, rows=rows, shared=scatter(shared, axes, scope))


def collect(arrived: Routed | None, *, like: jax.Array) -> jax.Array | None:
    """[B, T/ranks, D], the shape of `like`: the experts' output for this rank's positions, whole."""
    if arrived is None:
        return None
    out = exchange.collect(arrived.rows, arrived.places, arrived.weights).reshape(like.shape)
    return checkpoint_name(out if arrived.shared is None else out + arrived.shared, REDUCED)


def barrier_both(arrays: Any) -> Any:
    """`optimization_barrier` in both directions."""
    return barrier_backward(barrier_forward(arrays))
