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
from collections.abc import Iterator, Sequence

from ladder_jax.predict.machine import Algorithm, Halves, Link, Machine, Ring
from ladder_jax.predict.program import Form, Program, steps_of
from ladder_jax.predict.timeline import Slot, Timeline, Work, beside, play, play_slots, turns
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


def layers(
    model: Model,
    machine: Machine,
    block: Block,
    *,
    program: Program,
    steps: Sequence[Step] | None = None,
    times: int = 1,
    recompute: Recompute = NO_RECOMPUTE,
) -> Timeline:
    """The timeline of all layers of `block`.

    steps: by default the topology's. times: how often each kernel runs (backward: 2), without what
        `recompute` repeats.
    """
    split = model.ranks if program.form in (Form.SEQUENCE_PARALLEL, Form.COLLECTIVE_MATMUL) else 1
    steps = steps_of(model.config) if steps is None else steps
    kernels = functools.cache(lambda sublayers, block: model.step(sublayers, block, split=split))
    work_of = functools.partial(work, machine, times=times, recompute=recompute)
    settings = dict(contention=machine.contention, window=program.window)
    waits = machine.link is not None and machine.link.halves is Halves.NONE

    def all_reduce(part: Block) -> float:
        return reduction(model, machine, part, program=program, recompute=recompute)[1]

    def awaited(part: Block) -> float:
        """Of an all-reduce: a split stream's reduce-scatter, where programs cannot start it
        apart.
        """
        if program.form is Form.SEQUENCE_PARALLEL and waits:
            return machine.link.half(model.payload(part), ranks=model.ranks)
        return 0.0

    def of_half(half: Sequence[Kernel], whole: Sequence[Kernel]) -> Work:
        """It reads all weights, and starts as many kernels as the whole."""
        pairs = zip(half, whole, strict=True)
        return sum(
            (work_of([one]).slower(few_rows(one, other, machine=machine)) for one, other in pairs),
            Work(),
        )

    def exchanged(part: Block) -> Exchanged:
        """Of `block`, or of one of its halves."""
        own = exchanged_kernels(model, part)
        whole = exchanged_kernels(model, block)
        half = machine.link.half(model.payload(part), ranks=model.ranks)
        rows = machine.link.all_to_all(model.buffer_bytes(part), ranks=model.ranks)
        return Exchanged(
            **{name: of_half(own[name], whole[name]) for name in own},
            gather=(1 + recompute.gathers) * half,
            scatter=half,
            rows=(1 + recompute.rows) * rows,
            has_shared=bool(model.config.moe.shared_width),
        )

    if program.form is Form.EXCHANGE:
        if program.interleave == 2:
            slots = _exchange_turns(steps, [exchanged(half) for half in block.halves])
        else:
            slots = _exchange_slots(steps, exchanged(block))
        # where reduce-scatters are awaited, all messages are: that gathers are hidden is left out
        return play_slots(slots, contention=machine.contention, waits=waits)
    if program.form is Form.COLLECTIVE_MATMUL:
        ranks = model.ranks
        rounds, message = ring_message(machine.link, ranks=ranks, payload=model.payload(block))
        ring = dict(ranks=ranks, rounds=rounds, message=message, times=times)

        @functools.cache
        def in_rings(sublayers: tuple[int, ...]) -> tuple[float, float]:
            """Seconds with every product after a gather or before a scatter in a ring, and with
            none.
            """
            return sum(
                ring_product(machine, one, **ring)
                if one.name in (*AFTER_GATHER, *BEFORE_SCATTER)
                else work_of([one]).seconds
                for one in kernels(sublayers, block)
            ), work_of(kernels(sublayers, block)).seconds

        total = plain = 0.0
        for step in steps:
            seconds, alone = in_rings(step.sublayers)
            total += seconds
            plain += alone
        return Timeline(total, plain, 2 * rounds * message * len(steps), len(steps), bars=())
    if program.interleave == 2:
        halves = block.halves

        @functools.cache
        def work_of_half(sublayers: tuple[int, ...], half: int) -> Work:
            return of_half(kernels(sublayers, halves[half]), kernels(sublayers, block))

        slots = turns(
            steps,
            work=work_of_half,
            all_reduces=tuple(map(all_reduce, halves)),
            awaited=tuple(map(awaited, halves)),
        )
        return play_slots(slots, **settings)
    of_sublayers = functools.cache(lambda sublayers: work_of(kernels(sublayers, block)))
    sums = dict(all_reduce=all_reduce(block), awaited=awaited(block))
    return play(steps, work=of_sublayers, **sums, **settings)


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
`few_rows`. Chosen by the cycles that compilers estimate for two halves, over those of the whole
batch: the table in docs/guides/halves.md.
"""


def few_rows(kernel: Kernel, whole: Kernel, *, machine: Machine) -> float:
    """How much longer `kernel` takes than by the longer of operations and bytes. `whole` takes what
    the machine's constants say; a product of fewer rows reaches a smaller share of both rates.
    """

    def share(one: Kernel) -> float:
        compute = machine.seconds(flops=one.flops)
        memory = machine.seconds(size=one.size)
        together = (compute**BEND + memory**BEND) ** (1 / BEND)
        return together / max(compute, memory) if one.flops else 1.0

    return share(kernel) / share(whole)


def reduction(
    model: Model,
    machine: Machine,
    block: Block,
    *,
    program: Program,
    recompute: Recompute = NO_RECOMPUTE,
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


def ring_message(link: Link, *, ranks: int, payload: float) -> tuple[int, float]:
    """The rounds of a ring, and the seconds of a round's message; from node to node at the
    network's pace.
    """
    rounds = ranks - 1 if link.ring is Ring.ONE_WAY else ranks // 2
    step = link.step
    bandwidth = link.bandwidth
    if link.nodes(ranks) > 1:
        step = max(step, link.network.step)
        bandwidth = min(bandwidth, link.network.bandwidth)
    return rounds, step + (ranks - 1) / rounds * payload / ranks / bandwidth


def ring_product(
    machine: Machine, kernel: Kernel, *, ranks: int, rounds: int, message: float, times: int
) -> float:
    """Seconds of a matrix product in n chunks of its positions: each is multiplied while the next
    one is on its way. The library's own is parallel/ring.py; its scatter also adds what arrives,
    which is left out here.

        chunk + rounds x (a round's chunks beside its message)
        ring     n - 1 rounds of one chunk; both directions of a torus: half as many, of two

    A chunk reads all of the product's weights again, and starts a kernel of its own. Gather-matmul
    and matmul-scatter take as long. Backward, the gathering of the input again for the weights'
    gradient is left out, which favours this.
    """
    share = dict(flops=kernel.flops / ranks, activations=kernel.activations / ranks)
    chunk = work(machine, [dataclasses.replace(kernel, **share)], times=times)
    of_round = chunk.share((ranks - 1) / rounds)
    slowed = beside(of_round, wire=message, contention=machine.contention)
    return chunk.seconds + rounds * max(message, slowed)


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """A layer of one block, whose ranks exchange the rows of experts: its work, in the parts beside
    which messages stand, and seconds of the messages. rows: of a dispatch or a combine.
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
    gather: float
    scatter: float
    rows: float
    has_shared: bool

    @property
    def shared(self) -> Work:
        return self.shared_first + self.shared_last

    def input_of(self, step: Step) -> tuple[float, ...]:
        """The messages that bring it. A shared expert's input is gathered."""
        if step.sublayers == (ATTENTION,):
            return (self.gather,)
        return (self.gather, self.rows) if self.has_shared else (self.rows,)

    def output_of(self, step: Step) -> tuple[float, ...]:
        """The messages that sum it up. A shared expert's sum is reduce-scattered, by farskip with
        attention's.
        """
        if step.sublayers == (ATTENTION,):
            return (self.scatter,)
        return (self.rows, self.scatter) if self.has_shared and not step.early else (self.rows,)


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
    arriving: tuple[float, ...] = ()  # of the newest output, which none has launched yet
    for before, step, following in zip((None, *steps), steps, (*steps[1:], None)):
        attends = step.sublayers == (ATTENTION,)
        if not step.reduces:
            of_experts = part.route + part.shared + part.first + part.last + part.collect
            yield Slot(part.norm + (part.into + part.out if attends else of_experts))
            continue
        hides = step.delay > 0
        first, last = (part.into, part.out) if attends else (part.first, part.last)
        collect = part.collect if attends and arriving else none  # what arrives are experts' rows
        shared = none if attends or step.early else part.shared
        if step.early:
            yield Slot(part.shared)
        if arriving and not hides:
            yield Slot(transfers=arriving)
            yield Slot(collect)
            arriving = ()
            collect = none
        # otherwise the step before has made this one's input, beside its own second half
        if before is None or not step.reads_added:
            yield Slot(part.norm if attends else part.norm + part.route)
            if attends or part.has_shared:
                yield Slot(transfers=(part.gather,))
            if not attends:
                yield Slot(part.shared_first, (part.rows,))
        yield Slot(shared + first if hides else first, arriving)
        arriving = part.output_of(step)
        beside_last = none if attends or hides else part.shared_last
        if following is not None and following.reads_added:
            yield Slot(collect + part.norm + part.route if attends else part.norm)
            yield Slot(last + beside_last, part.input_of(following))
        elif step.pending_after:
            yield Slot(collect + last + beside_last)
        else:
            yield Slot(collect + last)
            yield Slot(beside_last, arriving[:1])
            yield Slot(transfers=arriving[1:])
            yield Slot(none if attends else part.collect)
            arriving = ()
    if arriving:
        yield Slot(transfers=arriving)
        yield Slot(part.collect)
