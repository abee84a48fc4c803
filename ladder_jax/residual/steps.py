"""The recurrence: the state between sublayers, the steps that move it on, and their all-reduces and barriers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.config import Launch
from ladder_jax.errors import UserError
from ladder_jax.parallel import all_reduce, pvary, ranks, start_all_reduce, varying
from ladder_jax.parallel.collectives import ENTER, LAUNCH, PREVIOUS, check_axes, opaque_copy

Sublayer = Callable[[jax.Array], jax.Array]
Sums = tuple[jax.Array | None, ...]  # oldest first; None is zero

REDUCED = "reduced"
"""The checkpoint name of every reduced sum: under a remat policy that does not save it, backward all-reduces again."""


@dataclasses.dataclass(frozen=True)
class Normed:
    """A sublayer by its function of the input, its norm's gain [D] (it can wait for that), and `Projections`."""

    function: Callable[..., jax.Array]
    gain: jax.Array

    def __call__(self, x: jax.Array, *more: Any) -> jax.Array:
        return self.function(x, self.gain, *more)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state between two sublayers; every array is [B, T, D].

    residual: the stream, equal on all tensor ranks (different on each in "no-communication").
    sums: all-reduced outputs that are not added yet, oldest first, because the next input leaves them out.
    partial: this rank's newest output, not reduced yet. None, here and in `sums`, is zero.
    local: in "desync" between two all-reduces, this rank's own stream.
    entered: with sequence parallelism, the next step's input (see sequence.py).
    routing: of a model with experts in training, what its routers have chosen (nn/routing.py), which layers add to.
    side: the side network's stream (nn/side.py), which layers hand on.
    """

    residual: jax.Array
    sums: tuple[jax.Array | None, ...] = ()
    partial: jax.Array | None = None
    local: jax.Array | None = None
    entered: jax.Array | None = None
    routing: Any = None
    side: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Delayed:
    """A step of the general rule (see residual/__init__.py): launch, compute, await.

    sublayers: which of a layer's (attention, MLP) it computes; both are summed before one reduction.
    pending_before: how many outputs are not yet part of the residual when the step starts.
    delay: how many of them, the newest, its input leaves out, counted in steps.
    pending_after: how many, its own among them, stay outside the residual after it; 0 reduces at once.
    fresh: the input also holds this rank's own partial of the output that it leaves out.
    early: sublayers of the same input, computed first and reduced with the newest output, which the input leaves out.
    """

    sublayers: tuple[int, ...]
    pending_before: int
    delay: int
    pending_after: int
    fresh: bool = False
    early: tuple[int, ...] = ()

    def __call__(
        self,
        state: State,
        sublayers: Sequence[Sublayer],
        *,
        axes: tuple[str, ...],
        launch: Launch = Launch.CHAINED,
    ) -> State:
        check_axes(axes)
        in_halves = launch is Launch.EXPLICIT and self.delay > 0 and state.partial is not None
        pending, entered = opaque_copy(state.partial, axes) if self.fresh else state.partial, None
        if self.early:
            entered = to_sublayer_input(state.residual, axes)
            pending = pending + compute(entered, self.early, sublayers, axes=axes)
        newest = None if in_halves else reduced(pending, axes, PREVIOUS)
        launched = (*state.sums, newest) if self.pending_before else ()
        stream = add(state.residual, launched[: self.pending_before - self.delay])
        entered, residual = to_sublayer_input(stream, axes) if entered is None else entered, state.residual
        if self.pending_after:
            entered, residual, launched = await_backward(entered, residual, launched, axes)
        if self.fresh:
            entered = add(entered, (state.partial,))
        if in_halves:
            entered, sublayers, started = start(pending, axes, entered, self.sublayers, sublayers)
        partial = compute(entered, self.sublayers, sublayers, axes=axes)
        if in_halves:
            partial, newest = done(partial, started)
            launched = (*launched[:-1], newest)
        elif self.delay:
            partial, launched = await_forward(partial, launched, axes)
        if self.pending_after == 0:
            return State(add(residual, (*launched, reduced(partial, axes))))
        added = self.pending_before + 1 - self.pending_after
        return State(add(residual, launched[:added]), launched[added:], partial)

    @property
    def reads_added(self) -> bool:
        """Whether its input leaves out all that is pending: the step before it can prepare that."""
        return self.delay == self.pending_before > 0

    def fill(self, state: State, *, axes: tuple[str, ...], dtype: jnp.dtype) -> State:
        """`state` with zeros in place of None: a scan's carry has one structure from its first turn on."""
        if self.pending_before == 0:
            return state
        zero = pvary(jnp.zeros_like(state.residual, dtype=dtype), varying(state.residual))
        sums = tuple(zero if s is None else s for s in state.sums)
        return dataclasses.replace(
            state, sums=sums, partial=pvary(zero, axes) if state.partial is None else state.partial
        )


@dataclasses.dataclass(frozen=True)
class Desynced:
    """A step on rank-local streams; `sync` averages them and sums the newest partials, in one all-reduce.

    The mean of the ranks' streams is the last synced stream plus the mean of what each has added
    since, its drift; so only drift / ranks + partial crosses the wire, and `State.partial` is the drift.
    """

    sublayers: tuple[int, ...]
    phase: int  # sublayers since the last all-reduce
    sync: bool
    delay: ClassVar[int] = 0
    pending_before: ClassVar[int] = 0

    def __call__(self, state: State, sublayers: Sequence[Sublayer], *, axes: tuple[str, ...], **_) -> State:
        check_axes(axes)
        local = to_sublayer_input(state.residual, axes) if state.local is None else state.local
        partial = compute(local, self.sublayers, sublayers, axes=axes)
        if self.sync:
            if state.partial is not None:
                partial = partial + state.partial / ranks(axes)
            return State(add(state.residual, (reduced(partial, axes),)))
        drift = partial if state.partial is None else state.partial + partial
        return State(state.residual, (), drift, add(local, (partial,)))

    def fill(self, state: State, *, axes: tuple[str, ...], dtype: jnp.dtype) -> State:
        return state  # a scan starts after an all-reduce, where nothing is pending


@dataclasses.dataclass(frozen=True)
class Silent:
    """A step of the standard Transformer without its all-reduce: wrong numbers, for timing only."""

    sublayers: tuple[int, ...]
    delay: ClassVar[int] = 0
    pending_before: ClassVar[int] = 0

    def __call__(self, state: State, sublayers: Sequence[Sublayer], *, axes: tuple[str, ...], **_) -> State:
        check_axes(axes)
        return State(add(state.residual, (compute(state.residual, self.sublayers, sublayers, axes=axes),)))

    def fill(self, state: State, *, axes: tuple[str, ...], dtype: jnp.dtype) -> State:
        return state


Step = Delayed | Desynced | Silent


def fill(state: State, steps: Sequence[Step], *, axes: tuple[str, ...], dtype: jnp.dtype | None = None) -> State:
    """`state` for a `lax.scan` over layers of equal `steps`: zeros where nothing is pending yet.

    A carry has one structure in all turns, so the first turn reduces zeros, which an unrolled loop does not.
    dtype: of the sublayers' outputs, by default the stream's.
    """
    return steps[0].fill(state, axes=axes, dtype=state.residual.dtype if dtype is None else dtype)


def flush(state: State, *, axes: tuple[str, ...]) -> jax.Array:
    """The final residual stream [B, T, D]: everything still pending is reduced and added."""
    return add(state.residual, (*state.sums, reduced(state.partial, axes, PREVIOUS)))


def compute(x: jax.Array, which: tuple[int, ...], sublayers: Sequence[Sublayer], *, axes: tuple[str, ...]) -> jax.Array:
    """This rank's partial sum of those sublayers.

    Raises UserError for a sublayer that returns the whole sum, which would be counted once per rank. With `check_vma`
    jax's types tell: a partial sum varies over the ranks.
    """
    first, *rest = (_partial(sublayers[index], x, axes) for index in which)
    return sum(rest, first)


def _partial(sublayer: Sublayer, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    out = sublayer(x)
    if out.shape != x.shape:
        raise UserError(f"a sublayer must return [B, T, D] as it reads, {x.shape}, not {out.shape}")
    reduced = (varying(x) & frozenset(axes)) - varying(out)
    if reduced:
        raise UserError(
            f"a sublayer's output is the same on all ranks of {', '.join(sorted(reduced))}, so they would be counted"
            " once each: return this rank's partial sum, without psum (a bias belongs to one rank only)"
        )
    return out


def add(stream: jax.Array, sums: Sequence[jax.Array | None]) -> jax.Array:
    """In the stream's dtype; None is zero."""
    for addend in sums:
        if addend is not None:
            stream = stream + addend.astype(stream.dtype)
    return stream


def reduced(partial: jax.Array | None, axes: tuple[str, ...], scope: str = "") -> jax.Array | None:
    """The all-reduced `partial`, under a name scope that the schedule's report looks for."""
    if partial is None:
        return None
    with jax.named_scope(f"{LAUNCH}/{scope}" if scope else LAUNCH):
        return checkpoint_name(all_reduce(partial, axes), REDUCED)


def start(
    pending: jax.Array, axes: tuple[str, ...], x: jax.Array, which: tuple[int, ...], sublayers: Sequence[Sublayer]
) -> tuple[jax.Array, Sequence[Sublayer], Any]:
    """The all-reduce of `pending`, started, and the sublayers with their input `x`, computed after that.

    They wait by their gains, which are small; plain functions by `x`, which then cannot be fused with what precedes it.
    """
    with jax.named_scope(f"{LAUNCH}/{PREVIOUS}"):
        started = start_all_reduce(pending, axes)
    if not all(isinstance(sublayers[index], Normed) for index in which):
        x, started = lax.optimization_barrier((x, started))
        return x, sublayers, started
    gains, started = lax.optimization_barrier(({index: sublayers[index].gain for index in which}, started))
    held = [Normed(one.function, gains[i]) if i in gains else one for i, one in enumerate(sublayers)]
    return x, held, started


def done(partial: jax.Array, started: Any) -> tuple[jax.Array, jax.Array]:
    """`partial`, and the sum of what was started, awaited after it. The next one starts later: one is in flight."""
    partial, started = lax.optimization_barrier((partial, started))
    with jax.named_scope(f"{LAUNCH}/{PREVIOUS}"):  # a TPU's compiler keeps this name for both halves
        summed = started.done()
    return lax.optimization_barrier((partial, summed))


def to_sublayer_input(stream: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`stream` as a sublayer's input. Its transpose is the all-reduce of the input's gradient."""
    with jax.named_scope(ENTER):
        return pvary(stream, axes)


def await_forward(partial: jax.Array, launched: Sums, axes: tuple[str, ...]) -> tuple[jax.Array, Sums]:
    """Barrier between a step's output and the newest all-reduce, so that the next one cannot be merged with it.

    Without effect on one rank, and in the first step, where no all-reduce is in flight.
    """
    *older, newest = launched
    if newest is None or ranks(axes) == 1:
        return partial, launched
    partial, newest = barrier_forward((partial, newest))
    return partial, (*older, newest)


def await_backward(
    entered: jax.Array, residual: jax.Array, launched: Sums, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array, Sums]:
    """The same barrier for the backward pass, where the gradient of a step's input is all-reduced.

    The gradient of `entered` is this rank's partial sum, reduced next; that of `residual` holds the later step's
    all-reduce. The earlier step's backward starts from the gradient of the newest output: it must come after this
    step's, because the next all-reduce hides under it.
    """
    if ranks(axes) == 1:
        return entered, residual, launched
    if not launched or launched[-1] is None:
        return (*barrier_backward((entered, residual)), launched)
    entered, residual, newest = barrier_backward((entered, residual, launched[-1]))
    return entered, residual, (*launched[:-1], newest)


@jax.custom_vjp
def barrier_forward(arrays):
    """`optimization_barrier` forward, identity backward."""
    return lax.optimization_barrier(arrays)


@jax.custom_vjp
def barrier_backward(arrays):
    """Identity forward, `optimization_barrier` backward."""
    return arrays


barrier_forward.defvjp(lambda arrays: (barrier_forward(arrays), None), lambda _, cotangents: (cotangents,))
barrier_backward.defvjp(lambda arrays: (arrays, None), lambda _, cotangents: (lax.optimization_barrier(cotangents),))
