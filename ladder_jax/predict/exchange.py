"""The timeline of layers whose ranks exchange the rows of experts, as residual/wires/exchange.py computes them.

There a barrier ties each transfer to one half of a sublayer: both begin together and are awaited together. So a layer
is a sequence of `Slot`s, and its seconds are the sum over them of the longer of transfers and compute:

    a ladder's attention   query, key, value           beside combine, of the layer before
                           add up, norm, router, fill
                           scores, output projection   beside dispatch
    its experts            gate, up                    beside attention's reduce-scatter
                           norm
                           down                        beside the gather of the next attention's input

A shared expert is tensor-parallel: its input is gathered with the dispatch. `farskip` computes it before the
reduce-scatter, which takes its sum too; in a ladder it stands beside that, and its sum is scattered with the next
combine. A standard layer waits for all transfers, but its shared expert's first products stand beside the dispatch and
its last one beside the combine.

N = B T / ranks tokens of a device have S slots with each of E experts (`MoEConfig.slots`; E with padding). So a device
sends E S rows, full or not, and computes as many: those of E / ranks experts, whose matrices are all read.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from ladder_jax.predict.link import Halves
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.timeline import Bar, Timeline, Work, beside
from ladder_jax.predict.work import ATTENTION, Block, Kernel, Model
from ladder_jax.residual import Silent, Step
from ladder_jax.schedule import shards

GATHER, SCATTER, DISPATCH, COMBINE = "gather", "reduce-scatter", "dispatch", "combine"


@dataclasses.dataclass(frozen=True)
class Slot:
    """Kernels, one after another, and transfers, one after another, that begin together and are awaited together."""

    kernels: tuple[Kernel, ...] = ()
    wires: tuple[str, ...] = ()


def play(
    steps: Sequence[Step], *, model: Model, machine: Machine, block: Block, work: Callable[[Sequence[Kernel]], Work]
) -> Timeline:
    """The timeline of a topology's steps, of all layers. work: the time of kernels without communication.

    Where a compiler cannot start and await a transfer apart, nothing stands beside one: on a v5e all-to-alls and
    reduce-scatters are synchronous. (A gather is not, which is left out.)
    """
    half = machine.link.half(model.payload(block), ranks=model.ranks)
    rows = machine.link.all_to_all(_bytes_sent(model, block), ranks=model.ranks)
    seconds = {GATHER: half, SCATTER: half, DISPATCH: rows, COMBINE: rows}
    waits = machine.link.halves is Halves.NONE
    now, compute, bars = 0.0, 0.0, []
    for slot in slots(steps, model=model, block=block):
        of_slot, started = work(slot.kernels), now
        for name in slot.wires:
            bars.append(Bar(name, now, now + seconds[name], wire=True))
            now = bars[-1].stop
        start = now if waits else started
        stop = start + beside(of_slot, wire=now - start, contention=machine.contention)
        if slot.kernels:
            bars.append(Bar(slot.kernels[0].name, start, stop, wire=False))
        now, compute = max(now, stop), compute + of_slot.seconds
    wires = [bar.stop - bar.start for bar in bars if bar.wire]
    return Timeline(seconds=now, compute=compute, wire=sum(wires), all_reduces=len(wires), bars=tuple(bars))


def slots(steps: Sequence[Step], *, model: Model, block: Block) -> Iterator[Slot]:
    """The slots of a topology's steps, in their order."""
    layer = _Layer.of(model, block)
    pending: tuple[str, ...] = ()  # the transfers of the newest output, which none has launched yet
    prepared = False  # whether the step before has made the next one's input, beside its own second half
    for step, following in zip(steps, (*steps[1:], None)):
        if isinstance(step, Silent):
            yield Slot(layer.attention if step.sublayers == (ATTENTION,) else layer.experts)
            continue
        prepares = following is not None and following.delay == following.pending_before > 0
        of_step = layer.attend if step.sublayers == (ATTENTION,) else layer.compute
        yield from of_step(step, pending, prepared=prepared, prepares=prepares)
        pending = layer.pending(step)
        prepared = prepares
    if pending:
        yield Slot(wires=pending)
        yield Slot(layer.collect)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer's kernels, in parts beside which a transfer may stand. shared: of the shared expert, if there is one."""

    norm: tuple[Kernel, ...]
    into: tuple[Kernel, ...]
    out: tuple[Kernel, ...]
    route: tuple[Kernel, ...]
    first: tuple[Kernel, ...]
    last: tuple[Kernel, ...]
    collect: tuple[Kernel, ...]
    shared: tuple[Kernel, ...]

    @classmethod
    def of(cls, model: Model, block: Block) -> "_Layer":
        norm, into, *out = model.step((ATTENTION,), block, shared_norm=False, split=model.ranks)
        router, fill, first, *last, collect = _routed(model, block)
        shared = tuple(model.shared_expert(block))
        return cls((norm,), (into,), tuple(out), (router, fill), (first,), tuple(last), (collect,), shared)

    @property
    def attention(self) -> tuple[Kernel, ...]:
        return self.norm + self.into + self.out

    @property
    def experts(self) -> tuple[Kernel, ...]:
        return self.norm + self.route + self.shared + self.first + self.last + self.collect

    def pending(self, step: Step) -> tuple[str, ...]:
        """The transfers of a step's output that the next step launches."""
        if step.pending_after == 0:
            return ()
        if step.sublayers == (ATTENTION,):
            return (SCATTER,)
        return (COMBINE, SCATTER) if self.shared and not step.early else (COMBINE,)

    def attend(self, step: Step, arriving: tuple[str, ...], *, prepared: bool, prepares: bool) -> Iterator[Slot]:
        """arriving: the transfers of the output before. prepared, prepares: this and the next step's input."""
        collect = self.collect if arriving else ()
        if arriving and step.delay == 0:
            yield Slot(wires=arriving)
            yield Slot(collect)
            arriving = collect = ()
        if not prepared:
            yield Slot(self.norm)
            yield Slot(wires=(GATHER,))
        yield Slot(self.into, arriving)
        if prepares:
            yield Slot(collect + self.norm + self.route)
            yield Slot(self.out, (GATHER, DISPATCH) if self.shared else (DISPATCH,))
        else:
            yield Slot(collect + self.out)
        if step.pending_after == 0:
            yield Slot(wires=(SCATTER,))

    def compute(self, step: Step, arriving: tuple[str, ...], *, prepared: bool, prepares: bool) -> Iterator[Slot]:
        """As `attend`, of the experts."""
        with_dispatch, with_combine, with_first = self.shared[:1], self.shared[1:], ()
        if step.early:
            yield Slot(self.shared)
        if step.delay:
            with_first = () if step.early else self.shared
            with_dispatch = with_combine = ()
        if not prepared:
            if step.delay < step.pending_before:
                yield Slot(wires=arriving)
                arriving = ()
            yield Slot(self.norm + self.route)
            if self.shared:
                yield Slot(wires=(GATHER,))
            yield Slot(with_dispatch, (DISPATCH,))
        yield Slot(with_first + self.first, arriving)
        if step.pending_after == 0:
            yield Slot(self.last)
            yield Slot(with_combine, (COMBINE,))
            if self.shared and not step.early:
                yield Slot(wires=(SCATTER,))
            yield Slot(self.collect)
        elif prepares:
            yield Slot(self.norm)
            yield Slot(self.last + with_combine, (GATHER,))
        else:
            yield Slot(self.last + with_combine)


def _rows(model: Model, block: Block) -> int:
    """Rows of a device's buffers: E S."""
    return shards.buffer_rows(model.config.moe, tokens=round(block.size / model.ranks), ranks=model.ranks)


def _bytes_sent(model: Model, block: Block) -> int:
    """Bytes of a device's buffers, of which it keeps its own experts' part."""
    return _rows(model, block) * model.config.d_model * model.element_bytes


def _routed(model: Model, block: Block) -> tuple[Kernel, ...]:
    """The kernels of the routed experts: of a device's own tokens, then of its experts' rows, then of its tokens."""
    moe, d_model, size = model.config.moe, model.config.d_model, model.element_bytes
    launches = model.implementation.launches
    tokens, rows, held = block.size / model.ranks, _rows(model, block), moe.padded(model.ranks) / model.ranks
    router, stream = d_model * moe.experts, tokens * d_model * size
    chosen = stream * moe.top_k

    def product(name: str, inputs: int, outputs: int) -> Kernel:
        weights, moved = held * inputs * outputs * size, rows * (inputs + outputs) * size
        return Kernel(name, 2 * rows * inputs * outputs, weights, activations=moved, launches=launches.matmul)

    return (
        Kernel("router", 2 * tokens * router, 4 * router, activations=stream, launches=launches.route),
        Kernel("fill", activations=2 * _bytes_sent(model, block), launches=1),
        product("gate, up", d_model, 2 * moe.expert_width),
        Kernel("activate", activations=3 * rows * moe.expert_width * size, launches=launches.activate),
        product("down", moe.expert_width, d_model),
        Kernel("add up", activations=3 * chosen + stream, launches=1),
    )
