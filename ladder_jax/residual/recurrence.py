"""The recurrence: which outputs a step launches, reads and adds; and its plain wire, one all-reduce
a step.

A `Step` is a description. A *wire* is how an output crosses the ranks: it takes a `State` over a
step (`advance`), and each of its methods is one thing that wires do differently. `AllReduce` is the
wire of the standard Transformer and of its Ladders; those in wires/ replace what they do in another
way.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.config.fields import check
from ladder_jax.errors import UserError
from ladder_jax.parallel import all_reduce, pvary, ranks, varying
from ladder_jax.parallel.collectives import Axes, check_axes, named, opaque_copy
from ladder_jax.scopes import ENTER, LAUNCH, PREVIOUS

Sublayer = Callable[[Array], Array]
Sublayers = Sequence[Sublayer]  # of a layer
Sums = tuple[Array | None, ...]  # oldest first; None is zero

REDUCED = "reduced"
"""The checkpoint name of every reduced sum: under a remat policy that does not save it, backward
all-reduces again.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state between two sublayers.

    residual: the stream [B, T, D], equal on all tensor ranks.
    sums: reduced outputs that are not added yet, oldest first, because the next input leaves them
        out.
    partial: this rank's newest output [B, T, D], not reduced yet. None, here and in `sums`, is
        zero.
    carried: what a wire has made ready for the next step, which only that wire reads.
    """

    residual: Array
    sums: Sums = ()
    partial: Any = None
    carried: Any = None


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the general rule (see residual/__init__.py): what it computes, reads and leaves
    pending.

    sublayers: which of a layer's (attention, MLP) it computes; both are summed before one
        reduction.
    pending_before: how many outputs are not yet part of the residual when the step starts.
    delay: how many of them, the newest, its input leaves out, counted in steps.
    pending_after: how many, its own among them, stay outside the residual after it; 0 reduces at
        once.
    fresh: the input also holds this rank's own partial of the output that it leaves out.
    early: sublayers that run before the newest output's reduction and are added to it (FarSkip's
        shared expert).
    reduces: whether its output is summed over the ranks.
    """

    reduces = True

    sublayers: tuple[int, ...]
    pending_before: int = 0
    delay: int = 0
    pending_after: int = 0
    fresh: bool = False
    early: tuple[int, ...] = ()

    def __call__(self, state: State, sublayers: Sublayers, *, axes: Axes) -> State:
        """The state after this step, over plain all-reduces."""
        return self.wire(axes).advance(state, self, sublayers)

    def wire(self, axes: Axes) -> "AllReduce":
        return AllReduce(axes)

    @property
    def reads_added(self) -> bool:
        """Whether its input leaves out all that is pending: the step before it can prepare that."""
        return self.delay == self.pending_before > 0

    def launched(self, sums: Sums, newest: Any) -> Sums:
        """All outputs that are pending when the step starts; `newest` is the one whose reduction it
        has launched.
        """
        return (*sums, newest) if self.pending_before else ()

    def read(self, launched: Sums) -> Sums:
        """Those that its input holds, beside the residual."""
        return launched[: self.pending_before - self.delay]

    def settle(self, residual: Array, launched: Sums) -> tuple[Array, Sums]:
        """The residual with the oldest of `launched`, and those that stay outside of it after this
        step.
        """
        added = self.pending_before + 1 - self.pending_after
        return add(residual, launched[:added]), launched[added:]


def with_next(
    layers: Sequence[Sequence[Step]], make: Callable[[Step, Step], Step]
) -> tuple[tuple[Step, ...], ...]:
    """Each step as `make` has it, of the step and the one after it.

    The last one as if another layer like its own came: a scan's layers are of equal steps.
    """
    steps = itertools.chain(*layers, layers[-1][:1])
    made = iter([make(step, after) for step, after in itertools.pairwise(steps)])
    return tuple(tuple(itertools.islice(made, len(of_layer))) for of_layer in layers)


# (x [B, T, ...], weights) -> arrays [B, T, ...], position by position
Product = Callable[[Array, Any], Any]
Project = Callable[[Product, Array, Any], Any]  # a product, and its arguments
local: Project = operator.call
"""The product of what this rank has."""


@dataclasses.dataclass(frozen=True)
class Projections:
    """How a sublayer computes its first products, of its input, and its last one, which makes its
    output.

    into: also gathers the input, [B, T/ranks, D]. out: also sums over the ranks, and keeps
        [B, T/ranks, D].
    """

    into: Project = local
    out: Project = local


LOCAL = Projections()


@dataclasses.dataclass(frozen=True)
class Normed:
    """A sublayer behind its norm, which a wire may take apart.

    function: of the normed input [B, T, D] and, where a wire has them, `projections`.
    norm: of an input, to `dtype`, with scale=gain; its `gain` likewise, of an input that is
        normalised but for that.
    gain: the norm's, [D]: a small array, which can wait where the whole sublayer has to.
    communicates: over the ranks, for a norm of its own. While it does, no wire can have a reduction
        in flight.
    projects: whether `function` takes `projections`.
    """

    function: Callable[..., Array]
    norm: Any
    dtype: jnp.dtype
    gain: Array
    communicates: bool = False
    projects: bool = True

    def normed(self, x: Array) -> Array:
        return self.norm(x, dtype=self.dtype, scale=self.gain)

    def gained(self, x: Array) -> Array:
        """`x`, normalised before, times the gain."""
        return self.norm.gain(x, dtype=self.dtype, scale=self.gain)


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """The plain wire. axes: the mesh axes of the ranks, of the `jax.shard_map` that it stands in,
    or UserError.
    """

    axes: Axes

    def __post_init__(self):
        check_axes(self.axes)

    def layers(self, layers: Sequence[Sequence[Step]]) -> tuple[tuple[Step, ...], ...]:
        """A topology's layers, with what this wire knows of each step."""
        return tuple(layers)

    def begin(self, x: Array, first: Step) -> State:
        """The state before `first`: `x` [B, T, D], equal on all ranks, to which nothing is still to
        be added.
        """
        return State(x, (None,) * (first.pending_before - 1))

    def advance(self, state: State, step: Step, sublayers: Sublayers) -> State:
        """The state after `step`: launch what is pending, enter with what is known, compute, and
        settle.
        """
        entered, launched = self.entered(state, step, sublayers)
        partial, residual, launched = self.output(
            step,
            entered,
            state.partial,
            sublayers,
            state.residual,
            launched,
            backward=step.pending_after > 0,
            forward=step.delay > 0,
        )
        return self.settled(step, residual, launched, partial)

    def entered(self, state: State, step: Step, sublayers: Sublayers) -> tuple[Any, Sums]:
        """(the step's input, all outputs that are pending, of which the newest is launched)."""
        pending = state.partial
        entered = state.carried
        if step.early:
            entered = self.enter(step, state.residual, sublayers) if entered is None else entered
            pending = pending + self.partial(step.early, entered, sublayers)
        launched = step.launched(state.sums, self.launch(step, pending, state.residual))
        if entered is None:
            entered = self.enter(step, add(state.residual, step.read(launched)), sublayers)
        return entered, launched

    def launch(self, step: Step, pending: Any, residual: Array, scope: str = PREVIOUS) -> Any:
        """The sum over the ranks of the newest output, of the step before."""
        return self.reduce(opaque_copy(pending, self.axes) if step.fresh else pending, scope)

    def enter(self, step: Step, stream: Array, sublayers: Sublayers) -> Any:
        """`stream` as the step's input. Its transpose is the all-reduce of the input's gradient."""
        with jax.named_scope(ENTER):
            return pvary(stream, self.axes)

    def output(
        self,
        step: Step,
        entered: Any,
        own: Any,
        sublayers: Sublayers,
        residual: Array,
        launched: Sums,
        *,
        backward: bool = True,
        forward: bool = True,
        scope: str = PREVIOUS,
    ) -> tuple[Array, Array, Sums]:
        """(the step's own output, `residual`, `launched`), tied to each other in these directions
        so that the sublayers hide what is launched.

        own: this rank's newest output, which a fresh ladder reads. scope: the name scope of what is
            launched.
        """
        several = ranks(self.axes) > 1
        newest = launched[-1:]
        if backward and several:
            # The gradient of `entered` is this rank's partial sum, reduced next; that of `residual`
            # holds the later step's all-reduce. The earlier step's backward starts from the
            # gradient of `newest`: it must come after this step's, because the next all-reduce
            # hides under it.
            entered, residual, newest = barrier_backward((entered, residual, newest))
        if step.fresh:
            entered = self.with_own(entered, own)
        partial = self.partial(step.sublayers, entered, sublayers)
        if forward and several and newest[0] is not None:
            # so that the next all-reduce cannot be merged with the newest one
            partial, newest = barrier_forward((partial, newest))
        return partial, residual, (*launched[:-1], *newest)

    def with_own(self, entered: Array, partial: Array | None) -> Array:
        """Of a fresh ladder: its input with this rank's own newest output."""
        return add(entered, (partial,))

    def partial(self, which: tuple[int, ...], entered: Array, sublayers: Sublayers) -> Array:
        """This rank's partial sum of those sublayers.

        Raises UserError for a sublayer that returns the whole sum, which would be counted once per
        rank. With `check_vma` jax's types tell: a partial sum varies over the ranks.
        """
        partials = []
        for index in which:
            sublayer = sublayers[index]
            if isinstance(sublayer, Normed):
                out = sublayer.function(self.normed(sublayer, entered))
            else:
                out = sublayer(entered)
            if out.shape != entered.shape:
                raise UserError(
                    f"a sublayer must return [B, T, D] as it reads, {entered.shape}, not {out.shape}"
                )
            whole = (varying(entered) & frozenset(self.axes)) - varying(out)
            if whole:
                raise UserError(
                    f"a sublayer's output is the same on all ranks of {', '.join(sorted(whole))}, so they would be"
                    " counted once each: return this rank's partial sum, without psum (a bias belongs to one rank only)"
                )
            partials.append(out)
        return sum(partials[1:], partials[0])

    def normed(self, sublayer: Normed, entered: Array) -> Array:
        """What the sublayer's function reads of a step's input."""
        return sublayer.normed(entered)

    def settled(self, step: Step, residual: Array, launched: Sums, partial: Array) -> State:
        if step.pending_after == 0:
            return State(add(residual, (*launched, self.reduce(partial))))
        return State(*step.settle(residual, launched), partial)

    def reduce(self, partial: Array | None, scope: str = "") -> Array | None:
        """The all-reduced `partial`, under a name scope that the schedule's report looks for."""
        if partial is None:
            return None
        with named(LAUNCH, scope):
            return checkpoint_name(all_reduce(partial, self.axes), REDUCED)

    def fill(self, state: State, steps: Sequence[Step], *, dtype: jnp.dtype) -> State:
        """`state` with zeros in place of None: the carry of a scan over `steps` has one structure
        in all turns.

        dtype: of a sublayer's output.
        """
        if steps[0].pending_before == 0:
            return state
        sums, partial = self.filled(state.residual, state.sums, state.partial, dtype)
        return dataclasses.replace(state, sums=sums, partial=partial)

    def filled(self, stream: Array, sums: Sums, partial: Any, dtype: jnp.dtype) -> tuple[Sums, Any]:
        """`sums` and `partial` beside a residual like `stream`, with zeros in place of None."""
        zero = jnp.zeros_like(stream, dtype)
        sums = tuple(zero if one is None else one for one in sums)
        return sums, pvary(zero, self.axes) if partial is None else partial

    # What two halves of a batch in turn ask of a wire beside `launch` and `enter` (see
    # interleave.py).

    def beside(self, step: Step, sublayers: Sublayers) -> "AllReduce":
        """The wire for a sum that is in flight while the step's sublayers compute."""
        return self

    def turn(
        self, step: Step, entered: Any, sublayers: Sublayers, *, own: Any, other: Any
    ) -> tuple[Any, State]:
        """(this half's output after `step`, the other half ready for its next step), one beside the
        other.

        own: this half's newest output, which a fresh ladder reads. other: `interleave.OtherHalf`.
        In the backward pass the gradient of its residual holds the sum of its later input's
        gradient: so sums come one after another, and none is merged.
        """
        partial, residual, (summed,) = self.output(
            step,
            entered,
            own,
            sublayers,
            other.state.residual,
            (other.launched,),
            scope=other.out,
        )
        return partial, other.settled(residual, summed)

    def prepare(self, after: Step, state: State, scope: str) -> State:
        """`state`, with the input of its step `after` where that crosses the ranks, too."""
        return state

    def flush(self, state: State) -> Array:
        """The final stream: everything still pending is reduced and added."""
        return add(state.residual, (*state.sums, self.reduce(state.partial, PREVIOUS)))


def check_stream(x: Array) -> None:
    """Raises UserError for one of integers, which would cut off what is added to it."""
    check(jnp.issubdtype(x.dtype, jnp.inexact), f"x must be of floating point, not {x.dtype}")


def add(stream: Array, sums: Sequence[Array | None]) -> Array:
    """In the stream's dtype; None is zero."""
    for addend in sums:
        if addend is not None:
            stream = stream + addend.astype(stream.dtype)
    return stream


@jax.custom_vjp
def barrier_forward(arrays):
    """`optimization_barrier` forward, identity backward."""
    return lax.optimization_barrier(arrays)


@jax.custom_vjp
def barrier_backward(arrays):
    """Identity forward, `optimization_barrier` backward."""
    return arrays


barrier_forward.defvjp(
    lambda arrays: (lax.optimization_barrier(arrays), None), lambda _, cotangents: (cotangents,)
)
barrier_backward.defvjp(
    lambda arrays: (arrays, None), lambda _, cotangents: (lax.optimization_barrier(cotangents),)
)
