"""The timeline of a model's layers, in each tensor-parallel form.

Exchanged experts are as residual/wires/exchange.py computes them. There a barrier ties each
transfer to one half of a sublayer, and so a layer is a sequence of slots, whose seconds are the
longer of transfers and compute:

    a ladder's attention   query, key, value           beside combine, of the layer before
                           add up, norm, router, sort
                           scores, output projection   beside dispatch
    its experts            gate, up                    beside attention's reduce-scatter
                           norm
                           down                        beside the gather of the next attention's input

Of two halves in turn the other half's messages stand there, for any topology.

A shared expert is tensor-parallel: its input is gathered with the dispatch. `farskip` computes it
before the reduce-scatter, which takes its sum too; in a ladder it stands beside that, and its sum
is scattered with the next combine. A standard layer waits for all transfers, but its shared
expert's first products stand beside the dispatch and its last one beside the combine.
"""

import dataclasses
import functools
import itertools
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
from ladder_jax.predict.work import (
    AFTER_GATHER,
    ATTENTION,
    BEFORE_SCATTER,
    MLP,
    NO_RECOMPUTE,
    SHARED,
    Block,
    Kernel,
    Model,
    Recompute,
)
from ladder_jax.residual import Step
from ladder_jax.schedule import models

WorkOf = Callable[[Sequence[Kernel]], Work]


@dataclasses.dataclass(frozen=True)
class Layers:
    """timeline: of all layers. algorithm, all_reduce: of the sublayers' reductions, and its
    seconds.
    """

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
    recompute: Recompute = NO_RECOMPUTE,
) -> Layers:
    """The layers of `block`.

    steps: by default the topology's. times: how often each kernel runs (backward: 2), without what
        `recompute` repeats.
    """
    split = model.ranks if program.form in (Form.SEQUENCE_PARALLEL, Form.COLLECTIVE_MATMUL) else 1
    steps = steps_of(model.config) if steps is None else steps
    kernels = functools.cache(lambda sublayers, block: model.step(sublayers, block, split=split))
    work_of = functools.partial(work, machine, times=times, recompute=recompute)
    of_sublayers = functools.cache(lambda sublayers: work_of(kernels(sublayers, block)))
    reduced = functools.partial(reduction, model, machine, program=program, recompute=recompute)
    algorithm, all_reduce = reduced(block)
    settings = dict(contention=machine.contention, window=program.window)

    def of_half(half: Sequence[Kernel], whole: Sequence[Kernel]) -> Work:
        """It reads all weights, and starts as many kernels as the whole."""
        pairs = zip(half, whole, strict=True)
        return sum(
            (work_of([one]).slower(few_rows(one, other, machine=machine)) for one, other in pairs),
            Work(),
        )

    @functools.cache
    def step_of_half(sublayers: tuple[int, ...], half: Block) -> Work:
        return of_half(kernels(sublayers, half), kernels(sublayers, block))

    def exchanged(part: Block) -> Exchanged:
        """Of `block`, or of one of its halves."""
        own = exchanged_kernels(model, part)
        whole = exchanged_kernels(model, block)
        works = {name: of_half(own[name], whole[name]) for name in own}
        return Exchanged.of(model, machine, part, works=works, recompute=recompute)

    if program.form is Form.EXCHANGE:
        waits = machine.link.halves is Halves.NONE  # on a v5e (but for gathers, which is left out)
        if program.interleave == 2:
            slots = _exchange_turns(steps, [exchanged(half) for half in block.halves])
        else:
            slots = _exchange_slots(steps, exchanged(block))
        timeline = play_slots(slots, contention=machine.contention, waits=waits)
    elif program.form is Form.COLLECTIVE_MATMUL:
        ring = RingProduct(machine, model.ranks, payload=model.payload(block), times=times)
        timeline = _in_rings(
            steps, kernels=lambda step: kernels(step.sublayers, block), work_of=work_of, ring=ring
        )
    elif program.interleave == 2:
        halves = block.halves
        each = tuple(reduced(half)[1] for half in halves)
        slots = turns(
            steps,
            work=lambda step, half: step_of_half(step.sublayers, halves[half]),
            all_reduces=each,
        )
        timeline = play_slots(slots, **settings)
    else:
        timeline = play(
            steps, work=lambda step: of_sublayers(step.sublayers), all_reduce=all_reduce, **settings
        )
    return Layers(timeline, algorithm if timeline.all_reduces else None, all_reduce)


def work(
    machine: Machine,
    kernels: Sequence[Kernel],
    *,
    times: int = 1,
    recompute: Recompute = NO_RECOMPUTE,
) -> Work:
    """The sum of the kernels' times: the compute of one kernel cannot hide the memory traffic of
    another.

    times: how often each runs, and those of `recompute` once more.
    """
    busy = sum(machine.seconds(flops=kernel.flops, size=kernel.size) for kernel in kernels)
    found = Work(
        busy=times * busy, idle=times * machine.launch * sum(kernel.launches for kernel in kernels)
    )
    repeated = [kernel for kernel in kernels if kernel.name in recompute.kernels]
    return found + work(machine, repeated) if repeated else found


BEND = 1.5
"""How sharply a matrix product turns from the pace of its bytes to that of its operations: see
`together`. Chosen by the cycles that compilers estimate for two halves, over those of the whole
batch: the table in docs/guides/halves.md.
"""


def few_rows(kernel: Kernel, whole: Kernel, *, machine: Machine) -> float:
    """How much longer `kernel` takes than by the longer of operations and bytes. `whole` takes what
    the machine's constants say; a product of fewer rows reaches a smaller share of both rates.
    """

    def share(one: Kernel) -> float:
        compute = machine.seconds(flops=one.flops)
        memory = machine.seconds(size=one.size)
        return together(compute, memory) / max(compute, memory) if one.flops else 1.0

    return share(kernel) / share(whole)


def together(compute: float, memory: float) -> float:
    """Seconds of a matrix product, of those that its operations and its bytes take alone."""
    return (compute**BEND + memory**BEND) ** (1 / BEND)


def reduction(
    model: Model, machine: Machine, block: Block, *, program: Program, recompute: Recompute
) -> tuple[Algorithm | None, float]:
    """How a sublayer's output is reduced, and its seconds: an all-reduce, or a reduce-scatter and
    an all-gather, with those of `recompute`.
    """
    if machine.link is None:
        return None, 0.0
    payload = model.payload(block)
    ranks = model.ranks
    algorithm, seconds = machine.link.fastest(payload, ranks=ranks, among=program.algorithms)
    if program.form is not Form.ALL_REDUCE:
        seconds = (2 + recompute.gathers) * machine.link.half(payload, ranks=ranks)
    return algorithm, seconds


@dataclasses.dataclass(frozen=True)
class RingProduct:
    """A matrix product in n chunks of its positions: each is multiplied while the next one is on
    its way. The library's own is parallel/ring.py; its scatter also adds what arrives, which is
    left out here.

        chunk + rounds x (a round's chunks beside its message)
        ring     n - 1 rounds of one chunk; both directions of a torus: half as many, of two

    A chunk reads all of the product's weights again, and starts a kernel of its own. Gather-matmul
    and matmul-scatter take as long. Backward, the gathering of the input again for the weights'
    gradient is left out, which favours this.
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
        round_ = max(
            self.message, beside(of_round, wire=self.message, contention=self.machine.contention)
        )
        return chunk.seconds + self.rounds * round_


def _in_rings(
    steps: Sequence[Step],
    *,
    kernels: Callable[[Step], tuple[Kernel, ...]],
    work_of: WorkOf,
    ring: RingProduct,
) -> Timeline:
    """Every product that follows a gather or precedes a scatter in a ring; the other kernels as
    they are.
    """
    ringed = (*AFTER_GATHER, *BEFORE_SCATTER)
    seconds = lambda kernel: (
        ring.seconds(kernel) if kernel.name in ringed else work_of([kernel]).seconds
    )
    of_step = functools.cache(
        lambda kernels: (sum(map(seconds, kernels)), work_of(kernels).seconds)
    )
    device = Device(contention=0.0)
    plain = 0.0
    for step in steps:
        in_ring, alone = of_step(kernels(step))
        device.compute(NAMES[step.sublayers], Work(in_ring, 0.0))
        plain += alone
    wire = 2 * ring.rounds * ring.message * len(steps)
    return dataclasses.replace(device.timeline(), compute=plain, wire=wire, all_reduces=len(steps))


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """A layer of one block, whose ranks exchange the rows of experts: its work, in the parts beside
    which messages stand, and the messages.
    """

    norm: Work
    into: Work
    out: Work
    route: Work
    first: Work
    last: Work
    collect: Work
    shared_first: Work
    shared_last: Work
    gather: Transfer
    scatter: Transfer
    dispatch: Transfer
    combine: Transfer
    has_shared: bool

    @classmethod
    def of(
        cls,
        model: Model,
        machine: Machine,
        block: Block,
        *,
        works: dict[str, Work],
        recompute: Recompute,
    ) -> "Exchanged":
        """works: of `exchanged_kernels`, by name."""
        half = machine.link.half(model.payload(block), ranks=model.ranks)
        one = machine.link.all_to_all(model.buffer_bytes(block), ranks=model.ranks)
        rows = (1 + recompute.rows) * one
        return cls(
            **works,
            gather=("gather", (1 + recompute.gathers) * half),
            scatter=("reduce-scatter", half),
            dispatch=("dispatch", rows),
            combine=("combine", rows),
            has_shared=bool(model.config.moe.shared_width),
        )

    @property
    def shared(self) -> Work:
        return self.shared_first + self.shared_last

    def input_of(self, step: Step) -> tuple[Transfer, ...]:
        """The messages that bring it. A shared expert's input is gathered."""
        if step.sublayers == (ATTENTION,):
            return (self.gather,)
        return (self.gather, self.dispatch) if self.has_shared else (self.dispatch,)

    def output_of(self, step: Step) -> tuple[Transfer, ...]:
        """The messages that sum it up. A shared expert's sum is reduce-scattered, by farskip with
        attention's.
        """
        if step.sublayers == (ATTENTION,):
            return (self.scatter,)
        return (
            (self.combine, self.scatter) if self.has_shared and not step.early else (self.combine,)
        )


def exchanged_kernels(model: Model, block: Block) -> dict[str, Sequence[Kernel]]:
    """The kernels of each part of an `Exchanged`."""
    norm, into, *out = model.step((ATTENTION,), block, split=model.ranks)
    router, sort, first, *last, collect = model.routed(block, exchanged=True)
    shared = model.shared_expert(block)
    return dict(
        norm=[norm],
        into=[into],
        out=out,
        route=[router, sort],
        first=[first],
        last=last,
        collect=[collect],
        shared_first=shared[:1],
        shared_last=shared[1:],
    )


def kernels_of_layers(
    model: Model, block: Block, *, exchanged: bool = False
) -> list[tuple[int, Model, Sequence[Kernel]]]:
    """Of each kind of layers their number, a model of such layers, and the kernels of one.

    exchanged: ranks exchange the rows of experts.
    """
    found = []
    for count, config in models.kinds(model.config):
        kind = dataclasses.replace(model, config=config)
        mlp = (MLP, SHARED) if config.residual == "farskip" else (MLP,)
        parts = (
            exchanged_kernels(kind, block).values()
            if exchanged
            else (kind.step((ATTENTION,), block), kind.step(mlp, block))
        )
        found.append((count, kind, list(itertools.chain(*parts))))
    return found


def _exchange_turns(steps: Sequence[Step], halves: Sequence[Exchanged]) -> Iterator[Slot]:
    """The slots of two halves in turn: beside a sublayer of one half the other half's newest output
    arrives, beside the sublayer's first products, and the input of its next step is sent, beside
    the rest.
    """
    first, second = halves
    yield Slot(first.norm)
    yield Slot(transfers=first.input_of(steps[0]))
    padded = (None, *steps, None)
    for place, step in enumerate(steps):
        for own, other, at in ((first, second, place), (second, first, place + 1)):
            # of the other half: the first half is one step ahead
            before, following = padded[at : at + 2]
            attends = step.sublayers == (ATTENTION,)
            yield Slot(
                own.into if attends else own.shared + own.first,
                other.output_of(before) if before else (),
            )
            yield Slot(_between(other, before, following))
            yield Slot(
                own.out if attends else own.last, other.input_of(following) if following else ()
            )
    yield Slot(transfers=second.output_of(steps[-1]))
    yield Slot(second.collect)


def _between(part: Exchanged, before: Step | None, following: Step | None) -> Work:
    """What stands between the output of a step, arrived, and the input of the next one."""
    collected = part.collect if before and before.sublayers != (ATTENTION,) else Work()
    if following is None:
        return collected
    routed = Work() if following.sublayers == (ATTENTION,) else part.route
    return collected + part.norm + routed


def _exchange_slots(steps: Sequence[Step], part: Exchanged) -> Iterator[Slot]:
    """The slots of a topology's steps, in their order, if ranks exchange the rows of experts."""
    none = Work()

    def attend(step: Step) -> Iterator[Slot]:
        waits = bool(arriving) and step.delay == 0
        if waits:
            yield Slot(transfers=arriving)
            yield Slot(part.collect)
        if not prepared:
            yield Slot(part.norm)
            yield Slot(transfers=(part.gather,))
        yield Slot(part.into, () if waits else arriving)
        collected = part.collect if arriving and not waits else none
        if prepares:
            yield Slot(collected + part.norm + part.route)
            yield Slot(part.out, part.input_of(following))
        else:
            yield Slot(collected + part.out)
        if step.pending_after == 0:
            yield Slot(transfers=(part.scatter,))

    def compute(step: Step) -> Iterator[Slot]:
        waits = not prepared and step.delay < step.pending_before
        if step.early:
            yield Slot(part.shared)
        if waits:
            yield Slot(transfers=arriving)
        if not prepared:
            yield Slot(part.norm + part.route)
            if part.has_shared:
                yield Slot(transfers=(part.gather,))
            yield Slot(none if step.delay else part.shared_first, (part.dispatch,))
        beside_scatter = part.shared if step.delay and not step.early else none
        yield Slot(beside_scatter + part.first, () if waits else arriving)
        beside_combine = none if step.delay else part.shared_last
        if step.pending_after == 0:
            yield Slot(part.last)
            yield Slot(beside_combine, (part.combine,))
            if part.has_shared and not step.early:
                yield Slot(transfers=(part.scatter,))
            yield Slot(part.collect)
        elif prepares:
            yield Slot(part.norm)
            yield Slot(part.last + beside_combine, (part.gather,))
        else:
            yield Slot(part.last + beside_combine)

    arriving: tuple[Transfer, ...] = ()  # of the newest output, which none has launched yet
    # whether the step before has made this one's input, beside its own second half
    prepared = False
    for step, following in zip(steps, (*steps[1:], None)):
        attends = step.sublayers == (ATTENTION,)
        if not step.reduces:
            of_experts = part.route + part.shared + part.first + part.last + part.collect
            yield Slot(part.norm + (part.into + part.out if attends else of_experts))
            continue
        prepares = following is not None and following.reads_added
        yield from attend(step) if attends else compute(step)
        arriving = () if step.pending_after == 0 else part.output_of(step)
        prepared = prepares
    if arriving:
        yield Slot(transfers=arriving)
        yield Slot(part.collect)
