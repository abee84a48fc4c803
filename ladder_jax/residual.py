"""Residual topologies: which sublayer reads which residual stream, and when its output is reduced.

A Transformer is a chain of sublayers h_1, h_2, ... (attention, MLP, attention, ...), each of which,
under tensor parallelism, yields a rank's *partial sum*; AR, the all-reduce, makes it whole. With
x_0 the embedding, one rule holds most topologies (Ladder Residual, arXiv 2501.06589, generalised):

    x_i = x_{i-1} + AR(h_i(x_{max(0, i-1-d_i)}))

where d_i is the *delay* of sublayer i. Delay 0 is the standard Transformer: h_i waits for AR(h_{i-1}).
Delay 1 is Ladder: h_i reads a stream that does not hold h_{i-1}'s output yet, so that output is
all-reduced while h_i computes. As code this is software pipelining over a small `State`:

    launch   summed = all_reduce(partial)           needs nothing that this step computes
    compute  fresh  = sublayer(residual)            reads a residual without `summed`: the overlap
    await    fresh, summed = optimization_barrier((fresh, summed))
    carry    residual + summed, fresh

and `flush` adds what is left after the last sublayer. Two things make the overlap survive the
compiler. The partial is carried *un-reduced*, so that in a `lax.scan` an all-reduce and the compute
that hides it stand in one loop body. And the barrier chains consecutive all-reduces, which are
independent otherwise and would be merged into one with nothing left to hide it.

The backward pass is the same pipeline the other way round: there a sublayer's *input* has the
gradient that must be reduced. It has a barrier of its own, and the forward barrier none in it: the
transpose of either would make one direction wait for what the other only has to keep apart. What
each direction does was chosen by compiled schedules (`ladder-jax overlap`, experiments/overlap):

    direction   all-reduce of           launched         barrier over               because otherwise
    forward,    a sublayer's output,    in the next      own output, newest sum     the two of a layer are merged;
    prefill,    carried un-reduced      step, or turn                               a scan's last one cannot leave
    decode                              of the scan                                 its turn, and is exposed
    backward    the gradient of a       in its own       that gradient, those of    XLA runs the earlier sublayer
                sublayer's input        step; a scan's   the residual and of the    first and leaves nothing under
                                        last hides       newest output              this one (so it did on v5p)
                                        under weight
                                        gradients

Both loop forms use the same steps. Carrying the backward's gradient un-reduced too was not needed:
in a scan's body both of its all-reduces are hidden on every target.

A sublayer never communicates; the topology owns every collective. For a model of your own, inside
`jax.shard_map` over an axis named "tensor" (`x` is [B, T, D], equal on all ranks of that axis):

    from ladder_jax import residual

    topology = residual.topology("ladder", num_layers=len(blocks))
    state = residual.begin(x, topology=topology, axes=("tensor",))
    for block, steps in zip(blocks, topology.layers):
        for step in steps:
            state = step(state, (block.attention, block.mlp), axes=("tensor",))
    x = residual.flush(state, axes=("tensor",))

`block.attention` and `block.mlp` are callables, norm included, from a rank's [B, T, D] input to its
partial sum [B, T, D].
"""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.config import Launch, ModelConfig, residual_names
from ladder_jax.parallel import explicit
from ladder_jax.parallel.collectives import ENTER, LAUNCH, PREVIOUS, all_reduce, ranks, vary, varying
from ladder_jax.parallel.options import Overlap

REDUCED = "reduced"
"""The checkpoint name of every reduced sum: a remat policy that does not save it reduces again."""

Sublayer = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What flows from sublayer to sublayer; every array is [B, T, D].

    residual: the stream, equal on all tensor ranks (this rank's own in "no-communication").
    sums: all-reduced outputs, oldest first, that some later sublayer must not read yet.
    partial: what this rank has still to reduce. In place of a sum or a partial, None is zero.
    local: in "desync" between two reductions, this rank's own stream.
    entered: with sequence parallelism, the next step's input (see sequence.py).
    """

    residual: jax.Array
    sums: tuple[jax.Array | None, ...] = ()
    partial: jax.Array | None = None
    local: jax.Array | None = None
    entered: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Delayed:
    """A step of the one rule: launch, compute, await.

    sublayers: which of a layer's (attention, MLP) it computes; both are summed before one reduction.
    lag: how many outputs are not yet part of the residual when the step starts.
    skip: how many of them, the newest, its input leaves out: the delay, counted in steps.
    keep: how many, its own among them, stay outside the residual after it; 0 reduces at once.
    fresh: the input also holds this rank's own partial of the output that it leaves out.
    """

    sublayers: tuple[int, ...]
    lag: int
    skip: int
    keep: int
    fresh: bool = False

    def __call__(
        self,
        state: State,
        sublayers: Sequence[Sublayer],
        *,
        axes: tuple[str, ...],
        launch: Launch = Launch.CHAINED,
    ) -> State:
        by_name = launch is Launch.EXPLICIT and self.skip > 0
        pending = _set_apart(state.partial, axes) if self.fresh else state.partial
        launched = (*state.sums, (_start if by_name else reduced)(pending, axes, PREVIOUS)) if self.lag else ()
        stream = add(state.residual, launched[: self.lag - self.skip])
        entered, residual = _enter(stream, axes), state.residual
        if self.keep and not by_name:
            entered, residual, launched = _await_backward(entered, residual, launched, axes)
        if self.fresh:
            entered = add(entered, (state.partial,))
        partial = compute(entered, self.sublayers, sublayers)
        if by_name and launched[-1] is not None:
            launched = (*launched[:-1], launched[-1].done())
        elif self.skip:
            partial, launched = _await(partial, launched, axes)
        if self.keep == 0:
            return State(add(residual, (*launched, reduced(partial, axes))))
        added = self.lag + 1 - self.keep
        return State(add(residual, launched[:added]), launched[added:], partial)

    def fill(self, state: State, *, axes: tuple[str, ...], dtype: jnp.dtype) -> State:
        """`state` with zeros for None: what a loop must carry, so that its first turn is like all."""
        if self.lag == 0:
            return state
        zero = vary(jnp.zeros(state.residual.shape, dtype), varying(state.residual))
        sums = tuple(zero if s is None else s for s in state.sums)
        return dataclasses.replace(
            state, sums=sums, partial=vary(zero, axes) if state.partial is None else state.partial
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

    def __call__(self, state: State, sublayers: Sequence[Sublayer], *, axes: tuple[str, ...], **_) -> State:
        local = _enter(state.residual, axes) if state.local is None else state.local
        partial = compute(local, self.sublayers, sublayers)
        if self.sync:
            if state.partial is not None:
                partial = partial + state.partial / ranks(axes)
            return State(add(state.residual, (reduced(partial, axes),)))
        drift = partial if state.partial is None else state.partial + partial
        return State(state.residual, (), drift, add(local, (partial,)))

    def fill(self, state: State, *, axes: tuple[str, ...], dtype: jnp.dtype) -> State:
        return state  # loops start where the ranks agree: nothing is pending


@dataclasses.dataclass(frozen=True)
class Silent:
    """A step of the standard Transformer without its all-reduce: wrong numbers, for timing only."""

    sublayers: tuple[int, ...]

    def __call__(self, state: State, sublayers: Sequence[Sublayer], *, axes: tuple[str, ...], **_) -> State:
        return State(add(state.residual, (compute(state.residual, self.sublayers, sublayers),)))

    def fill(self, state: State, *, axes: tuple[str, ...], dtype: jnp.dtype) -> State:
        return state


Step = Delayed | Desynced | Silent


class Communication(enum.Enum):
    DELAYED = "delayed"
    DESYNC = "desync"
    NONE = "none"


@dataclasses.dataclass(frozen=True)
class Topology:
    """A residual topology, as a value: two are equal if they compute the same function the same way.

    delays: d_i of sublayers 1..2L (attention, MLP, attention, ...).
    joint: for each layer, whether attention and MLP are summed before one all-reduce.
    fresh: for each layer, whether its sublayers read their rank's own newest partial.
    period: in a desync, the number of sublayers from one all-reduce to the next.
    shared_norm: attention and MLP of a layer read one norm's output.
    """

    delays: tuple[int, ...]
    joint: tuple[bool, ...]
    fresh: tuple[bool, ...]
    communication: Communication = Communication.DELAYED
    period: int = 1
    shared_norm: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.joint)

    @property
    def overlap(self) -> Overlap:
        """Whether some all-reduce has a sublayer to hide under: what the compiler's best options depend on."""
        return Overlap.HIDES if any(getattr(s, "skip", 0) for layer in self.layers for s in layer) else Overlap.WAITS

    @property
    def layers(self) -> tuple[tuple[Step, ...], ...]:
        """For each layer, the steps that compute it: two, or one where attention and MLP are joint."""
        if self.communication is Communication.NONE:
            return ((Silent((0,)), Silent((1,))),) * self.num_layers
        if self.communication is Communication.DESYNC:
            count = 2 * self.num_layers
            steps = [
                Desynced((i % 2,), phase=i % self.period, sync=(i + 1) % self.period == 0 or i + 1 == count)
                for i in range(count)
            ]
            return tuple(itertools.batched(steps, 2))
        return _delayed_layers(self)


def topology(name: str, *, num_layers: int, ladder_layers: str | None = None) -> Topology:
    """The topology called `name` (`config.residual_names` lists them); raises UserError for an unknown one.

    With `ladder_layers` ("N", "i,j" or "all") only those layers are of that kind, the rest standard.
    """
    parsed = residual_names.parse(name)
    of_kind = {
        "ladder": (parsed.number, parsed.number),
        "ladder-fresh": (1, 1),
        "parallel": (0, 1),
        "parallel-shared-norm": (0, 1),
        "parallel-ladder": (2, 3),
    }.get(parsed.kind, (0, 0))
    chosen = range(num_layers)
    if ladder_layers is not None:
        chosen = residual_names.layer_indices(ladder_layers, num_layers)
    layers = [layer in chosen for layer in range(num_layers)]
    return Topology(
        delays=sum((of_kind if ladder else (0, 0) for ladder in layers), ()),
        joint=tuple(ladder and parsed.kind.startswith("parallel") for ladder in layers),
        fresh=tuple(ladder and parsed.kind == "ladder-fresh" for ladder in layers),
        communication={"desync": Communication.DESYNC, "no-communication": Communication.NONE}.get(
            parsed.kind, Communication.DELAYED
        ),
        period=parsed.number if parsed.kind == "desync" else 1,
        shared_norm=parsed.kind == "parallel-shared-norm",
    )


def of_model(config: ModelConfig) -> Topology:
    return topology(config.residual, num_layers=config.num_layers, ladder_layers=config.ladder_layers)


def begin(x: jax.Array, *, topology: Topology, axes: tuple[str, ...]) -> State:
    """The state before the first sublayer; `x` [B, T, D] is the embedding, equal on all ranks."""
    if topology.communication is Communication.NONE:
        return State(vary(x, axes))
    lag = getattr(topology.layers[0][0], "lag", 0)
    return State(x, (None,) * (lag - 1))


def flush(state: State, *, axes: tuple[str, ...]) -> jax.Array:
    """The final residual stream [B, T, D]: everything still pending is reduced and added."""
    return add(state.residual, (*state.sums, reduced(state.partial, axes, PREVIOUS)))


def reduced(partial: jax.Array | None, axes: tuple[str, ...], scope: str = "") -> jax.Array | None:
    """The sum of every rank's partial: where a topology communicates, named so that a program can be searched."""
    if partial is None:
        return None
    with jax.named_scope(f"{LAUNCH}/{scope}" if scope else LAUNCH):
        return checkpoint_name(all_reduce(partial, axes), REDUCED)


def _set_apart(partial: jax.Array | None, axes: tuple[str, ...]) -> jax.Array | None:
    """`partial`, by an operation that compilers cannot see through, for a reduction beside which it is read.

    Else v5e hides none: it fuses an all-reduce with matmuls only where nothing else reads its operand.
    And v5p, unrolled, hides 3 of 8 instead of 7: it issues every second one after the matmuls.
    """
    if partial is None or ranks(axes) == 1:
        return partial
    return jnp.where(lax.axis_index(axes) >= 0, partial, 0)


def _start(partial: jax.Array | None, axes: tuple[str, ...], scope: str):
    if partial is None:
        return None
    with jax.named_scope(f"{LAUNCH}/{scope}"):
        return explicit.start(partial, axes)


def _enter(stream: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    with jax.named_scope(ENTER):
        return vary(stream, axes)


def compute(x: jax.Array, which: tuple[int, ...], sublayers: Sequence[Sublayer]) -> jax.Array:
    """This rank's partial sum of those sublayers."""
    first, *rest = (sublayers[index](x) for index in which)
    return sum(rest, first)


def _await(partial, launched, axes):
    """Tie a step's output to the newest all-reduce in flight, so that the next one cannot join it.

    One rank has nothing to hide, and in the first step nothing is in flight.
    """
    *older, newest = launched
    if newest is None or ranks(axes) == 1:
        return partial, launched
    partial, newest = tie_forward((partial, newest))
    return partial, (*older, newest)


def _await_backward(entered, residual, launched, axes):
    """The same for the backward pass, where the step's input has an all-reduce in flight.

    The gradient of `entered` is this rank's partial sum, reduced next; that of `residual` holds the
    later step's, reduced meanwhile; and that of the newest output is where the earlier step begins,
    which must not run ahead of this one: it is what the next reduction is to hide under.
    """
    if ranks(axes) == 1:
        return entered, residual, launched
    if not launched or launched[-1] is None:
        return (*_tie_backward((entered, residual)), launched)
    entered, residual, newest = _tie_backward((entered, residual, launched[-1]))
    return entered, residual, (*launched[:-1], newest)


@jax.custom_vjp
def tie_forward(arrays):
    """The arrays, each of which is there only when all are; their gradients are independent."""
    return lax.optimization_barrier(arrays)


@jax.custom_vjp
def _tie_backward(arrays):
    return arrays


tie_forward.defvjp(lambda arrays: (tie_forward(arrays), None), lambda _, cotangents: (cotangents,))
_tie_backward.defvjp(lambda arrays: (arrays, None), lambda _, cotangents: (lax.optimization_barrier(cotangents),))


def add(stream: jax.Array, sums: Sequence[jax.Array | None]) -> jax.Array:
    """In the stream's dtype; None is zero."""
    for addend in sums:
        if addend is not None:
            stream = stream + addend.astype(stream.dtype)
    return stream


def _delayed_layers(topology: Topology) -> tuple[tuple[Delayed, ...], ...]:
    """Delays, counted in sublayers, as steps that know how much is pending before and after them."""
    delays = list(itertools.batched(topology.delays, 2))
    # One extra turn of the last layer, as if the model went on: so its last layers are like those
    # before them, and one loop body serves all; `flush` then adds what they leave pending.
    extra = 1 + max(topology.delays)
    kinds = list(zip(delays, topology.joint, topology.fresh, strict=True))
    kinds += kinds[-1:] * extra
    groups = [((0, 1),) if joint else ((0,), (1,)) for _, joint, _ in kinds]

    skips, done = [], [0]  # done[s]: how many steps complete the first s sublayers
    for (delay, joint, _), layer in zip(kinds, groups, strict=True):
        first = len(done) - 1
        for group in layer:
            sublayer = first + group[0]
            read = sublayer - delay[group[0]]
            # Before the first layer stand imagined ones of its own kind, whose outputs are zero.
            steps_read = done[read] if read >= 0 else -(-read // (2 if topology.joint[0] else 1))
            if steps_read is None:
                raise ValueError(f"delay {delay} reads the middle of a layer whose sublayers are joint")
            skips.append(done[sublayer] - steps_read)
            done += [None, done[sublayer] + 1] if joint else [done[sublayer] + 1]

    lags = [0] * (len(skips) + 1)
    for index in reversed(range(len(skips))):
        lags[index] = max(skips[index], lags[index + 1] - 1)
    steps = iter(zip(skips, lags, lags[1:]))
    return tuple(
        tuple(Delayed(group, lag, skip, keep, fresh) for group, (skip, lag, keep) in zip(layer, steps))
        for layer, (_, _, fresh) in zip(groups[: topology.num_layers], kinds)
    )
