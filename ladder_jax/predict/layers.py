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
is scattered with the next combine. A standard layer waits for all transfers, but its shared expert
stands beside the dispatch (in the program its last product stands beside the combine).
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

from ladder_jax.predict.machine import Algorithm, Halves, Ring
from ladder_jax.predict.program import Form, Program, steps_of
from ladder_jax.predict.timeline import Slot, Timeline, Work, play, play_slots, turns
from ladder_jax.predict.work import (
    ATTENTION,
    MLP,
    RINGED,
    SHARED,
    Block,
    Kernel,
    Model,
    Task,
)
from ladder_jax.residual import Step
from ladder_jax.schedule import models


def layers(task: Task, program: Program, *, steps: Sequence[Step] | None = None) -> Timeline:
    """The timeline of all layers. steps: by default the topology's."""
    model = task.model
    steps = steps_of(model.config) if steps is None else steps
    if program.form is Form.COLLECTIVE_MATMUL:
        return _in_rings(task, steps)
    # where reduce-scatters are awaited, all messages are: that gathers are hidden is left out
    waits = program.form is not Form.ALL_REDUCE and task.machine.link.halves is Halves.NONE
    settings = dict(contention=task.machine.contention, window=program.window, waits=waits)
    if program.form is Form.EXCHANGE:
        return play_slots(_exchange(task, steps, program), **settings)
    split = model.ranks if program.form is Form.SEQUENCE_PARALLEL else 1
    parts = _parts(task, program)
    sums = [reduction(part, program)[1] for part in parts]

    @functools.cache
    def work(sublayers: tuple[int, ...], number: int = 0) -> Work:
        part = parts[number]
        whole = model.step(sublayers, task.block, split=split)
        return _part_work(part, model.step(sublayers, part.block, split=split), whole)

    if len(parts) == 2:
        return play_slots(turns(steps, work=work, all_reduces=sums), **settings)
    return play(steps, work=work, all_reduce=sums[0], **settings)


def _parts(task: Task, program: Program) -> list[Task]:
    """The whole, or its halves."""
    blocks = task.block.halves if program.interleave == 2 else [task.block]
    return [dataclasses.replace(task, block=block) for block in blocks]


BEND = 1.5
"""How sharply a matrix product turns from the pace of its bytes to that of its operations: see
`_part_work`. Chosen by the cycles that compilers estimate for two halves, over those of the whole
batch: the table in docs/guides/halves.md.
"""


def _part_work(task: Task, part: Iterable[Kernel], whole: Iterable[Kernel]) -> Work:
    """A half reads all weights, and starts as many kernels as the whole. The whole's products take
    what the machine's constants say; a product of fewer rows reaches a smaller share of both rates.
    """

    def share(one: Kernel) -> float:
        compute = task.machine.seconds(flops=one.flops)
        memory = task.machine.seconds(size=one.size)
        together = (compute**BEND + memory**BEND) ** (1 / BEND)
        return together / max(compute, memory) if one.flops else 1.0

    total = Work()
    for one, other in zip(part, whole, strict=True):
        total += task.work([one]).slower(share(one) / share(other))
    return total


def reduction(task: Task, program: Program) -> tuple[Algorithm | None, float]:
    """How a sublayer's output is reduced, and its seconds: an all-reduce, or a reduce-scatter and
    an all-gather, with those that are recomputed.
    """
    link = task.machine.link
    if link is None:
        return None, 0.0
    algorithm, seconds = link.fastest(
        task.model.payload(task.block), ranks=task.model.ranks, among=program.algorithms
    )
    if program.form is not Form.ALL_REDUCE:
        seconds = (2 + task.recompute.gathers) * task.half
    return algorithm, seconds


def _in_rings(task: Task, steps: Sequence[Step]) -> Timeline:
    """Every product after a gather or before a scatter in a ring. What its chunks take longer counts
    as communication.
    """
    slots = []
    plain = 0.0
    for step in steps:
        for kernel in task.model.step(step.sublayers, task.block, split=task.model.ranks):
            alone = task.work([kernel])
            plain += alone.seconds
            if kernel.name in RINGED:
                slots += ring_product(task, kernel)
            else:
                slots.append(Slot(alone))
    played = play_slots(slots, contention=task.machine.contention)
    return dataclasses.replace(played, compute=plain, all_reduces=len(steps))


def ring_product(task: Task, kernel: Kernel) -> list[Slot]:
    """A matrix product in n chunks of its positions: each is multiplied while the next one is on
    its way, from node to node at the network's pace. The library's own is parallel/ring.py; its
    scatter also adds what arrives, which is left out here.

        chunk + rounds x (a round's chunks beside its message)
        ring     n - 1 rounds of one chunk; both directions of a torus: half as many, of two

    A chunk reads all of the product's weights again, and starts a kernel of its own. Gather-matmul
    and matmul-scatter take as long. Backward, the gathering of the input again for the weights'
    gradient is left out, which favours this.
    """
    ranks = task.model.ranks
    link = task.machine.link
    rounds = ranks - 1 if link.ring is Ring.ONE_WAY else ranks // 2
    count = (ranks - 1) / rounds  # of chunks in a round
    step = link.step
    bandwidth = link.bandwidth
    if link.nodes(ranks) > 1:
        step = max(step, link.network.step)
        bandwidth = min(bandwidth, link.network.bandwidth)
    message = step + count * task.model.payload(task.block) / ranks / bandwidth
    part = dataclasses.replace(
        kernel, flops=kernel.flops / ranks, activations=kernel.activations / ranks
    )
    chunk = task.work([part])
    return [Slot(chunk), *rounds * [Slot(chunk.share(count), [message])]]


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """A sublayer of one block, whose ranks exchange the rows of experts. enter: before its work, once
    its input has arrived; first, second: its work, beside whose two parts messages stand; leave: once
    its output has arrived. shared: of a shared expert. inputs, outputs: seconds of the messages that
    bring its input, and of those that sum its output up.
    """

    enter: Work = Work()
    first: Work = Work()
    second: Work = Work()
    leave: Work = Work()
    shared: Work = Work()
    inputs: Sequence[float] = ()
    outputs: Sequence[float] = ()


NONE = Exchanged()
"""Before the first sublayer, and after the last one."""


def _kernels_of_exchanged(model: Model, block: Block) -> tuple[Sequence[Kernel], ...]:
    """Of attention to enter, first and second; of experts likewise, to leave, and the shared one's."""
    norm, into, *out = model.step((ATTENTION,), block, split=model.ranks)
    router, sort, first, *last, collect = model.routed(block, exchanged=True)
    experts = [norm, router, sort], [first], last, [collect], model.shared_expert(block)
    return [norm], [into], out, *experts


def kernels_of_layers(model: Model, block: Block) -> list[tuple[int, Model, Sequence[Kernel]]]:
    """Of each kind of layers their number, a model of such layers, and the kernels of one."""
    found = []
    for count, config in models.kinds(model.config):
        kind = dataclasses.replace(model, config=config)
        mlp = (MLP, SHARED) if config.residual == "farskip" else (MLP,)
        kernels = [*kind.step((ATTENTION,), block), *kind.step(mlp, block)]
        found.append((count, kind, kernels))
    return found


def every_kernel(model: Model, block: Block) -> Iterator[tuple[int, Kernel]]:
    """Each kernel of a pass forward, and how often it runs: of embedding and head, and of layers."""
    for kernel in model.ends(block):
        yield 1, kernel
    for count, _, kernels in kernels_of_layers(model, block):
        for kernel in kernels:
            yield count, kernel


def _exchange(task: Task, steps: Sequence[Step], program: Program) -> Iterator[Slot]:
    """The slots of all layers, if ranks exchange the rows of experts."""
    parts = [_exchanged(part, task.block, steps) for part in _parts(task, program)]
    if len(parts) == 2:
        yield from _exchange_turns(*parts)
    else:
        yield from _exchange_slots(steps, *parts)
    last = parts[-1][-1]
    yield Slot(transfers=last.outputs)
    yield Slot(last.leave)


def _exchanged(part: Task, whole: Block, steps: Sequence[Step]) -> list[Exchanged]:
    """Each step's, of the whole block or of one of its halves. A shared expert's input is gathered,
    and its sum is reduce-scattered, by farskip with attention's.
    """
    model = part.model
    sends = all(step.reduces for step in steps)
    buffers = model.buffer_rows(part.block) * model.config.d_model * model.element_bytes
    exchange = part.machine.link.all_to_all(buffers, ranks=model.ranks)
    gather = sends * (1 + part.recompute.gathers) * part.half
    scatter = sends * part.half
    rows = sends * (1 + part.recompute.rows) * exchange
    own = _kernels_of_exchanged(model, part.block)
    of_whole = _kernels_of_exchanged(model, whole)
    norm, into, out, *work = map(functools.partial(_part_work, part), own, of_whole)
    attention = Exchanged(norm, into, out, inputs=[gather], outputs=[scatter])
    experts = Exchanged(*work, inputs=[rows], outputs=[rows])
    if experts.shared.seconds:
        experts = dataclasses.replace(experts, inputs=[gather, rows], outputs=[rows, scatter])
    early = dataclasses.replace(experts, outputs=[rows])
    of_experts = lambda step: early if step.early else experts
    return [attention if one.sublayers == (ATTENTION,) else of_experts(one) for one in steps]


def _exchange_turns(first: Sequence[Exchanged], second: Sequence[Exchanged]) -> Iterator[Slot]:
    """The slots of two halves in turn, each beside the messages of the other: up to the last sublayer,
    whose output has nothing beside it.
    """
    turns = [*itertools.chain(*zip(first, second))]
    yield Slot(turns[0].enter)
    yield Slot(transfers=turns[0].inputs)
    for before, own, following in zip((NONE, *turns), turns, (*turns[1:], NONE)):
        yield from _sublayer(own, own.shared, before=before, following=following)


def _exchange_slots(steps: Sequence[Step], sublayers: Sequence[Exchanged]) -> Iterator[Slot]:
    """The slots of a topology's steps, in their order, each beside the messages of its neighbours, if
    it does without them: up to the last sublayer, whose output has nothing beside it.
    """
    before = NONE
    ready = False  # whether the step before has brought this one's input
    for place, (step, own) in enumerate(zip(steps, sublayers)):
        shared = own.shared
        if step.early:
            yield Slot(shared)
            shared = Work()
        if not step.delay:
            yield Slot(transfers=before.outputs)
            yield Slot(before.leave)
            before = NONE
        if not ready:
            yield Slot(own.enter)
            *gathered, newest = own.inputs
            yield Slot(transfers=gathered)
            yield Slot(shared, [newest])
            shared = Work()
        ready = place + 1 < len(steps) and steps[place + 1].reads_added
        following = sublayers[place + 1] if ready else NONE
        yield from _sublayer(own, shared, before=before, following=following)
        before = own


def _sublayer(
    own: Exchanged, shared: Work, *, before: Exchanged, following: Exchanged
) -> Iterator[Slot]:
    """A step in two parts. Beside the first one the output of `before` arrives, beside the second one
    the input of `following` is sent.
    """
    yield Slot(shared + own.first, before.outputs)
    yield Slot(before.leave + following.enter)
    yield Slot(own.second, following.inputs)
