"""The timeline of a model's layers, in each tensor-parallel form.

Exchanged experts are as residual/wires/exchange.py computes them. There a barrier ties each transfer to one half of a
sublayer, and so a layer is a sequence of slots, whose seconds are the longer of transfers and compute:

    a ladder's attention   query, key, value           beside combine, of the layer before
                           add up, norm, router, sort
                           scores, output projection   beside dispatch
    its experts            gate, up                    beside attention's reduce-scatter
                           norm
                           down                        beside the gather of the next attention's input

A shared expert is tensor-parallel: its input is gathered with the dispatch. `farskip` computes it before the
reduce-scatter, which takes its sum too; in a ladder it stands beside that, and its sum is scattered with the next
combine. A standard layer waits for all transfers, but its shared expert's first products stand beside the dispatch and
its last one beside the combine.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from ladder_jax.predict.machine import Algorithm, Halves, Machine, Ring
from ladder_jax.predict.program import Form, Program, steps_of
from ladder_jax.predict.timeline import (
    NAMES,
    Device,
    Slot,
    Timeline,
    Transfer,
    Work,
    beside,
    play,
    play_slots,
    turns,
)
from ladder_jax.predict.work import AFTER_GATHER, ATTENTION, BEFORE_SCATTER, Block, Kernel, Model
from ladder_jax.residual import Step

WorkOf = Callable[[Sequence[Kernel]], Work]


@dataclasses.dataclass(frozen=True)
class Layers:
    """timeline: of all layers. algorithm, all_reduce: of the sublayers' reductions, and its seconds."""

    timeline: Timeline
    algorithm: Algorithm | None
    all_reduce: float


def layers(
    model: Model,
    machine: Machine,
    block: Block,
    *,
    program: Program,
    steps: Sequence[Step] | None = None,
    times: int = 1,
) -> Layers:
    """The layers of `block`. steps: by default the topology's. times: how often each kernel runs (backward: 2)."""
    split = model.ranks if program.form in (Form.SEQUENCE_PARALLEL, Form.COLLECTIVE_MATMUL) else 1
    steps = steps_of(model.config) if steps is None else steps
    kernels = functools.cache(lambda sublayers, block: model.step(sublayers, block, split=split))
    work_of = functools.partial(work, machine, times=times)
    of_sublayers = functools.cache(lambda sublayers: work_of(kernels(sublayers, block)))
    algorithm, all_reduce = reduction(model, machine, block, program=program)
    settings = dict(contention=machine.contention, window=program.window)

    @functools.cache
    def of_half(sublayers: tuple[int, ...], half: Block) -> Work:
        """It reads all weights, and starts as many kernels as the whole."""
        whole = kernels(sublayers, block)
        pairs = zip(kernels(sublayers, half), whole, strict=True)
        return sum((work_of([one]).slower(few_rows(one, other, machine=machine)) for one, other in pairs), Work())

    if program.form is Form.EXCHANGE:
        slots = _exchange_slots(steps, model, machine, block, work_of=work_of)
        waits = machine.link.halves is Halves.NONE  # on a v5e (but for gathers, which is left out)
        timeline = play_slots(slots, contention=machine.contention, waits=waits)
    elif program.form is Form.COLLECTIVE_MATMUL:
        ring = RingProduct(machine, model.ranks, payload=model.payload(block), times=times)
        timeline = _in_rings(steps, kernels=lambda step: kernels(step.sublayers, block), work_of=work_of, ring=ring)
    elif program.interleave == 2:
        halves = block.halves
        each = tuple(reduction(model, machine, half, program=program)[1] for half in halves)
        slots = turns(steps, work=lambda step, half: of_half(step.sublayers, halves[half]), all_reduces=each)
        timeline = play_slots(slots, **settings)
    else:
        timeline = play(steps, work=lambda step: of_sublayers(step.sublayers), all_reduce=all_reduce, **settings)
    return Layers(timeline, algorithm if timeline.all_reduces else None, all_reduce)


def work(machine: Machine, kernels: Sequence[Kernel], *, times: int = 1) -> Work:
    """The sum of the kernels' times: the compute of one kernel cannot hide the memory traffic of another.

    times: how often each runs.
    """
    busy = sum(machine.seconds(flops=kernel.flops, size=kernel.size) for kernel in kernels)
    return Work(busy=times * busy, idle=times * machine.launch * sum(kernel.launches for kernel in kernels))


BEND = 1.5
"""How sharply a matrix product turns from the pace of its bytes to that of its operations: see `together`. Chosen by
the cycles that compilers estimate for two halves, over those of the whole batch: the table in docs/guides/halves.md."""


def few_rows(kernel: Kernel, whole: Kernel, *, machine: Machine) -> float:
    """How much longer `kernel` takes than by the longer of operations and bytes. `whole` takes what the machine's
    constants say; a product of fewer rows reaches a smaller share of both rates."""

    def share(one: Kernel) -> float:
        compute = machine.seconds(flops=one.flops)
        memory = machine.seconds(size=one.size)
        return together(compute, memory) / max(compute, memory) if one.flops else 1.0

    return share(kernel) / share(whole)


def together(compute: float, memory: float) -> float:
    """Seconds of a matrix product, of those that its operations and its bytes take alone."""
    return (compute**BEND + memory**BEND) ** (1 / BEND)


def reduction(model: Model, machine: Machine, block: Block, *, program: Program) -> tuple[Algorithm | None, float]:
    """How a sublayer's output is reduced, and its seconds: an all-reduce, or a reduce-scatter and an all-gather."""
    payload = model.payload(block)
    ranks = model.ranks
    algorithm, seconds = machine.fastest_all_reduce(payload, ranks=ranks, among=program.algorithms)
    if program.form is not Form.ALL_REDUCE and machine.link:
        seconds = 2 * machine.link.half(payload, ranks=ranks)
    return algorithm, seconds


@dataclasses.dataclass(frozen=True)
class RingProduct:
    """A matrix product in n chunks of its positions: each is multiplied while the next one is on its way. The library's
    own is parallel/ring.py; its scatter also adds what arrives, which is left out here.

        chunk + rounds x (a round's chunks beside its message)
        ring     n - 1 rounds of one chunk; both directions of a torus: half as many, of two

    A chunk reads all of the product's weights again, and starts a kernel of its own. Gather-matmul and matmul-scatter
    take as long. Backward, the gathering of the input again for the weights' gradient is left out, which favours this.
    """

    machine: Machine
    ranks: int
    payload: float
    times: int

    @property
    def rounds(self) -> int:
        return self.ranks - 1 if self.machine.link.ring is Ring.ONE_WAY else self.ranks // 2

    @property
    def message(self) -> float:
        """Seconds of a round's message; from node to node at the network's pace."""
        link = self.machine.link
        step = link.step
        bandwidth = link.bandwidth
        if link.nodes(self.ranks) > 1:
            step = max(step, link.network.step)
            bandwidth = min(bandwidth, link.network.bandwidth)
        return step + (self.ranks - 1) / self.rounds * self.payload / self.ranks / bandwidth

    def seconds(self, kernel: Kernel) -> float:
        share = dict(flops=kernel.flops / self.ranks, activations=kernel.activations / self.ranks)
        chunk = work(self.machine, [dataclasses.replace(kernel, **share)], times=self.times)
        of_round = chunk.share((self.ranks - 1) / self.rounds)
        round_ = max(self.message, beside(of_round, wire=self.message, contention=self.machine.contention))
        return chunk.seconds + self.rounds * round_


def _in_rings(
    steps: Sequence[Step], *, kernels: Callable[[Step], tuple[Kernel, ...]], work_of: WorkOf, ring: RingProduct
) -> Timeline:
    """Every product that follows a gather or precedes a scatter in a ring; the other kernels as they are."""
    ringed = (*AFTER_GATHER, *BEFORE_SCATTER)
    seconds = lambda kernel: ring.seconds(kernel) if kernel.name in ringed else work_of([kernel]).seconds
    of_step = functools.cache(lambda kernels: (sum(map(seconds, kernels)), work_of(kernels).seconds))
    device = Device(contention=0.0)
    plain = 0.0
    for step in steps:
        in_ring, alone = of_step(kernels(step))
        device.compute(NAMES[step.sublayers], Work(in_ring, 0.0))
        plain += alone
    wire = 2 * ring.rounds * ring.message * len(steps)
    return dataclasses.replace(device.timeline(), compute=plain, wire=wire, all_reduces=len(steps))


def _exchange_slots(
    steps: Sequence[Step], model: Model, machine: Machine, block: Block, *, work_of: WorkOf
) -> Iterator[Slot]:
    """The slots of a topology's steps, in their order, if ranks exchange the rows of experts."""
    shared_kernels = model.shared_expert(block)
    norm, into, *out = model.step((ATTENTION,), block, split=model.ranks)
    router, sort, first, *last, collect = model.routed(block, exchanged=True)
    parts = [norm], [into], out, [router, sort], [first], last, [collect], shared_kernels, shared_kernels[:1]
    norm, into, out, route, first, last, collect, shared, shared_first = map(work_of, parts)
    shared_last = work_of(shared_kernels[1:])
    half = machine.link.half(model.payload(block), ranks=model.ranks)
    rows = machine.link.all_to_all(model.buffer_bytes(block), ranks=model.ranks)
    gather = ("gather", half)
    scatter = ("reduce-scatter", half)
    dispatch = ("dispatch", rows)
    combine = ("combine", rows)
    none = Work()

    def attend(step: Step) -> Iterator[Slot]:
        waits = bool(arriving) and step.delay == 0
        if waits:
            yield Slot(transfers=arriving)
            yield Slot(collect)
        if not prepared:
            yield Slot(norm)
            yield Slot(transfers=(gather,))
        yield Slot(into, () if waits else arriving)
        collected = collect if arriving and not waits else none
        if prepares:
            yield Slot(collected + norm + route)
            yield Slot(out, (gather, dispatch) if shared_kernels else (dispatch,))
        else:
            yield Slot(collected + out)
        if step.pending_after == 0:
            yield Slot(transfers=(scatter,))

    def compute(step: Step) -> Iterator[Slot]:
        waits = not prepared and step.delay < step.pending_before
        if step.early:
            yield Slot(shared)
        if waits:
            yield Slot(transfers=arriving)
        if not prepared:
            yield Slot(norm + route)
            if shared_kernels:
                yield Slot(transfers=(gather,))
            yield Slot(none if step.delay else shared_first, (dispatch,))
        beside_scatter = shared if step.delay and not step.early else none
        yield Slot(beside_scatter + first, () if waits else arriving)
        beside_combine = none if step.delay else shared_last
        if step.pending_after == 0:
            yield Slot(last)
            yield Slot(beside_combine, (combine,))
            if shared_kernels and not step.early:
                yield Slot(transfers=(scatter,))
            yield Slot(collect)
        elif prepares:
            yield Slot(norm)
            yield Slot(last + beside_combine, (gather,))
        else:
            yield Slot(last + beside_combine)

    arriving: tuple[Transfer, ...] = ()  # of the newest output, which none has launched yet
    prepared = False  # whether the step before has made this one's input, beside its own second half
    for step, following in zip(steps, (*steps[1:], None)):
        attends = step.sublayers == (ATTENTION,)
        if not step.reduces:
            yield Slot(norm + (into + out if attends else route + shared + first + last + collect))
            continue
        prepares = following is not None and following.reads_added
        yield from attend(step) if attends else compute(step)
        with_shared = (combine, scatter) if shared_kernels and not step.early else (combine,)
        arriving = () if step.pending_after == 0 else (scatter,) if attends else with_shared
        prepared = prepares
    if arriving:
        yield Slot(transfers=arriving)
        yield Slot(collect)
