"""Experts whose rows are exchanged: the topologies' steps on a split stream, with two all-to-alls a
layer.

Attention is as in sequence.py: its input is gathered over the tensor ranks, its output
reduce-scattered. The routed experts of a layer read a rank's own positions and send each row to the
rank of its expert and back (parallel/ exchange.py), so what they return is whole. In a Ladder both
all-to-alls stand beside attention, and both of attention's collectives beside the experts, each
beside one half:

    attention of layer k   combine          the rows of layer k-1's experts      beside its first products
                           stream           + their weighted sums
                           dispatch         layer k's rows, of that stream       beside its scores and its last product
    experts of layer k     reduce_scatter   attention's output                   beside their first products
                           all_gather       the next attention's input           beside their last product

The backward pass takes the steps in reverse, each message by its transpose: dispatch beside
attention's last product and scores, combine beside its first products; all_gather beside the
experts' last product, reduce_scatter beside their first.

Barriers tie what arrives in each half to the half's products, in both directions. Without them a
compiler for TPUs awaits each all-to-all where it has issued it, and one for GPUs leaves the
reduce-scatters nothing.

A shared expert stays tensor-parallel: its input is gathered, and its partial sum reduce-scattered
with attention's ("farskip"), or on its own. In a standard layer it is all that the all-to-alls can
stand beside, each beside one half.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.config import MoEConfig
from ladder_jax.parallel import exchange
from ladder_jax.parallel.collectives import Axes, named, pvary, ranks
from ladder_jax.residual.interleave import Turn
from ladder_jax.residual.loop import EXCHANGED
from ladder_jax.residual.recurrence import REDUCED, State, add, barrier_forward
from ladder_jax.residual.wires.sequence import (
    Beside,
    SequenceParallel,
    SplitStep,
    gather,
    scatter,
)
from ladder_jax.scopes import ENTER, FOLLOWING, LAUNCH, PREVIOUS

ATTENTION, EXPERTS = 0, 1  # of a layer's sublayers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routed:
    """Rows between two steps: a state's `carried` before its experts, its `partial` after them.

    rows: [E/ranks, ranks S, D], of this rank's experts; after them [ranks S, E/ranks, D], their
        outputs.
    places, weights: float32 [N, K], of the outputs of this rank's tokens, once they are combined.
    shared: of the shared expert, if there is one, the input [B, T, D], later the partial sum; or
        what of it is this rank's, summed.
    """

    rows: Array
    places: Array
    weights: Array
    shared: Array | None


@dataclasses.dataclass(frozen=True)
class ExchangeStep(SplitStep):
    """Attention's. shared_before: whether the experts before it leave the shared expert's partial
    sum, too.
    """

    shared_before: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange(SequenceParallel):
    """For topologies that `check_exchange` allows, of attention and experts, an
    `nn.experts.NormedExperts`.
    """

    moe: MoEConfig

    def layers(self, layers):
        result = []
        _, before = layers[0]
        for attention, experts in super().layers(layers):
            leaves = bool(self.moe.shared_width and before.pending_after and not before.early)
            result.append((ExchangeStep(**vars(attention), shared_before=leaves), experts))
            before = experts
        return tuple(result)

    def launch(self, step, pending, residual, scope=PREVIOUS):
        arriving = combine(pending, self.axes, scope)
        return arriving if is_hidden(step) else collect(arriving, like=residual)

    def enter(self, step, stream, sublayers):
        made = self._made(step.sublayers, stream, sublayers)
        return self._sent(made, "", beside_shared=not is_hidden(step))

    def partial(self, which, entered, sublayers):
        """Of the one sublayer that runs early, the shared expert."""
        return sublayers[EXPERTS].shared(entered.shared)

    def advance(self, state, step, sublayers):
        entered, launched = self.entered(state, step, sublayers)
        stream = state.residual
        newest = launched[-1] if launched and is_hidden(step) else None
        following = (EXPERTS,) if step.sublayers == (ATTENTION,) else (ATTENTION,)

        def settle(newest):
            sums = launched
            if newest is not None:
                sums = (*launched[:-1], self._arrived(newest, like=stream))
            return State(*step.settle(stream, sums)) if step.pending_after else State(stream, sums)

        def make(state):
            if not step.prepares:
                return None
            return self._made(following, state.residual, sublayers)

        def send(made):
            return self._sent(made, FOLLOWING, beside_shared=not is_hidden(step))

        beside = Beside(newest, settle=settle, make=make, send=send)
        output = self._output(step, entered, sublayers, beside)
        if step.pending_after == 0:
            state = beside.state
            own = collect(combine(output, self.axes, "", shared_last=True), like=stream)
            return State(add(state.residual, (*state.sums, own)))
        output, state = beside.after(output)
        return dataclasses.replace(state, partial=output)

    def turn(self, step, entered, sublayers, *, own, other):
        return self.turn_beside(step, entered, sublayers, other)

    def _output(self, step, entered, sublayers, beside):
        """Attention's partial sum, or the `Routed` rows of the experts and of the shared one."""
        if step.sublayers == (ATTENTION,):
            return super()._output(step, entered, sublayers, beside)
        parts = sublayers[EXPERTS]
        rows = entered.rows
        shared = None

        def with_rows(product, x, weights):
            nonlocal rows
            products = product(x, weights)
            if not is_hidden(step):
                products, rows = barrier_forward((products, rows))
            return products

        if entered.shared is not None and not step.early:
            shared = parts.shared(entered.shared, into=with_rows)
        return dataclasses.replace(
            entered, rows=parts.compute(rows, into=beside.between), shared=shared
        )

    def fill(self, state, steps, *, dtype):
        state = super().fill(state, steps, dtype=dtype)
        if steps[0].shared_before or state.partial is None:
            return state
        return dataclasses.replace(state, partial=dataclasses.replace(state.partial, shared=None))

    def filled(self, stream, sums, partial, dtype):
        rows, length, width = stream.shape
        count = ranks(self.axes)

        def zero(shape, dtype):
            return pvary(jnp.zeros_like(stream, dtype, shape), self.axes)

        sums = tuple(zero(stream.shape, dtype) if one is None else one for one in sums)
        if partial is None:
            tokens = rows * length
            choices = zero((tokens, self.moe.top_k), jnp.float32)
            of_experts = zero(
                (count * self.moe.slots(tokens), self.moe.padded(count) // count, width), dtype
            )
            shared = zero((rows, length * count, width), dtype) if self.moe.shared_width else None
            partial = Routed(of_experts, choices, choices, shared)
        return sums, partial

    def flush(self, state):
        newest = collect(combine(state.partial, self.axes), like=state.residual)
        return add(state.residual, (*state.sums, newest))

    def _arrived(self, newest, *, like):
        return collect(newest, like=like)

    def _made(self, which, stream, sublayers, *, fresh=False):
        """Of experts its tokens' rows in buffers [E, S, D], and for the shared expert
        [B, T/ranks, D].
        """
        x = super()._made(which, stream, sublayers, fresh=fresh)
        if which == (ATTENTION,):
            return x
        count = ranks(self.axes)
        tokens, slots, weights = sublayers[EXPERTS].route(x)
        experts = self.moe.padded(count)
        size = self.moe.slots(len(tokens))
        places = exchange.places(slots, experts=experts, size=size, count=count)
        buffers = exchange.fill(tokens, slots, experts=experts, size=size)
        return Routed(buffers, places, weights, x if self.moe.shared_width else None)

    def _sent(self, made, scope, *, beside_shared=False):
        """Or the rows of all tokens for this rank's experts.

        beside_shared: the shared expert's input comes first, since nothing but that expert hides
            the rows.
        """
        if not isinstance(made, Routed):
            return super()._sent(made, scope)
        buffers = made.rows
        shared = made.shared
        shared = None if shared is None else gather(shared, self.axes, scope)
        if beside_shared and shared is not None:
            buffers, shared = barrier_forward((buffers, shared))
        with named(ENTER, scope):
            rows = exchange.dispatch(buffers, axes=self.axes)
        return dataclasses.replace(made, rows=checkpoint_name(rows, EXCHANGED), shared=shared)


def combine(
    partial: Routed | Array | None, axes: Axes, scope: str = PREVIOUS, *, shared_last: bool = False
) -> Routed | Array | None:
    """Computed rows on the ranks of their tokens, and this rank's positions of the shared expert's
    sum; of attention those of its sum.

    shared_last: it is reduce-scattered after the rows have arrived, beside which its last product
        can be.
    """
    if not isinstance(partial, Routed):
        return scatter(partial, axes, scope)
    with named(LAUNCH, scope):
        rows = checkpoint_name(exchange.combine(partial.rows, axes=axes), EXCHANGED)
    shared = partial.shared
    if shared_last and shared is not None:
        shared, rows = barrier_forward((shared, rows))
    return dataclasses.replace(partial, rows=rows, shared=scatter(shared, axes, scope))


def collect(arrived: Routed | Array | None, *, like: Array) -> Array | None:
    """[B, T/ranks, D], the shape of `like`: what has arrived, of experts its rows' weighted
    sums.
    """
    if not isinstance(arrived, Routed):
        return arrived
    out = exchange.collect(arrived.rows, arrived.places, arrived.weights).reshape(like.shape)
    return checkpoint_name(out if arrived.shared is None else out + arrived.shared, REDUCED)


def is_hidden(step) -> bool:
    """Whether messages of this step stand beside a sublayer that does not wait for them."""
    return step.delay > 0 or isinstance(step, Turn)
