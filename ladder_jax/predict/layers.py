"""The timeline of a model's layers, in each tensor-parallel form."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence

from ladder_jax.config import ModelConfig
from ladder_jax.predict import exchange
from ladder_jax.predict.implementation import Implementation
from ladder_jax.predict.link import Algorithm, Ring
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.program import Form, Program
from ladder_jax.predict.timeline import NAMES, Bar, Timeline, Work, beside, play, play_in_turn
from ladder_jax.predict.work import AFTER_GATHER, BEFORE_SCATTER, DENSE, MLP, Block, Kernel, Model
from ladder_jax.residual import Step, Topology, of_model


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
    ranks, split, shared_norm = model.ranks, _split(program, model.ranks), _topology(model.config).shared_norm
    steps = steps_of(model.config) if steps is None else steps
    algorithm, all_reduce = reduction(model, machine, block, program=program)

    @functools.cache
    def kernels(sublayers: tuple[int, ...]) -> tuple[Kernel, ...]:
        return model.step(sublayers, block, shared_norm=shared_norm, split=split)

    work = functools.cache(lambda sublayers: work_of(kernels(sublayers), machine, model.implementation, times=times))
    if program.form is Form.EXCHANGE:
        of_kernels = lambda kernels: work_of(kernels, machine, model.implementation, times=times)
        timeline = exchange.play(steps, model=model, machine=machine, block=block, work=of_kernels)
    elif program.form is Form.COLLECTIVE_MATMUL:
        ring = RingProduct(machine, ranks, payload=model.payload(block), times=times)
        timeline = _in_rings(steps, work=work, kernels=kernels, ring=ring)
    elif program.interleave == 2:
        timeline = _in_turn(steps, model, machine, block, program=program, times=times)
    else:
        of_step = lambda step: work(step.sublayers)
        settings = dict(all_reduce=all_reduce, contention=machine.contention, window=program.window)
        timeline = play(steps, work=of_step, **settings)
    return Layers(timeline, algorithm if timeline.all_reduces else None, all_reduce)


def _in_turn(
    steps: Sequence[Step], model: Model, machine: Machine, block: Block, *, program: Program, times: int
) -> Timeline:
    """Two halves of `block`. Each reads all weights, and starts as many kernels as the whole."""
    split, shared_norm = _split(program, model.ranks), _topology(model.config).shared_norm
    halves = block.halves

    @functools.cache
    def work(sublayers: tuple[int, ...], half: int) -> Work:
        of = lambda block: model.step(sublayers, block, shared_norm=shared_norm, split=split)
        kernels, whole = of(halves[half]), of(block)
        slower = [few_rows(one, of_all, machine=machine) for one, of_all in zip(kernels, whole, strict=True)]
        return work_of(kernels, machine, model.implementation, times=times, slower=slower)

    return play_in_turn(
        steps,
        work=lambda step, half: work(step.sublayers, half),
        all_reduces=tuple(reduction(model, machine, half, program=program)[1] for half in halves),
        contention=machine.contention,
        window=program.window,
    )


BEND = 1.5
"""How sharply a matrix product turns from the pace of its bytes to that of its operations: see `together`. Chosen by
the cycles that compilers estimate for two halves, over those of the whole batch: the table in docs/guides/halves.md."""


def few_rows(kernel: Kernel, whole: Kernel, *, machine: Machine) -> float:
    """How much longer `kernel` takes than by the longer of operations and bytes. `whole` takes what the machine's
    constants say; a product of fewer rows reaches a smaller share of both rates."""

    def share(one: Kernel) -> float:
        compute = machine.seconds(flops=one.flops, size=0)
        memory = machine.seconds(flops=0, size=one.weights + one.activations + one.cache)
        return together(compute, memory) / max(compute, memory) if one.flops else 1.0

    return share(kernel) / share(whole)


def together(compute: float, memory: float) -> float:
    """Seconds of a matrix product, of those that its operations and its bytes take alone."""
    return (compute**BEND + memory**BEND) ** (1 / BEND)


@functools.lru_cache(maxsize=64)
def steps_of(config: ModelConfig) -> tuple[Step, ...]:
    """The topology's steps, in order; first layers without experts have `DENSE` for `MLP`."""
    dense = 0 if config.moe is None else config.moe.dense_layers
    of_dense = lambda step: tuple(DENSE if one == MLP else one for one in step.sublayers)
    steps = []
    for layer, of_layer in enumerate(_topology(config).layers):
        steps += [dataclasses.replace(one, sublayers=of_dense(one)) for one in of_layer] if layer < dense else of_layer
    return tuple(steps)


@functools.lru_cache(maxsize=64)  # a sweep predicts the same configuration many times
def _topology(config: ModelConfig) -> Topology:
    return of_model(config)


def reduction(model: Model, machine: Machine, block: Block, *, program: Program) -> tuple[Algorithm | None, float]:
    """How a sublayer's output is reduced, and its seconds: an all-reduce, or a reduce-scatter and an all-gather."""
    payload, ranks = model.payload(block), model.ranks
    algorithm, seconds = machine.fastest_all_reduce(payload, ranks=ranks, among=program.algorithms)
    if program.form is not Form.ALL_REDUCE and machine.link:
        seconds = 2 * machine.link.half(payload, ranks=ranks)
    return algorithm, seconds


def work_of(
    kernels: Sequence[Kernel],
    machine: Machine,
    implementation: Implementation,
    *,
    times: int = 1,
    slower: Iterable[float] = itertools.repeat(1.0),
) -> Work:
    """The sum of the kernels' times: the compute of one kernel cannot hide the memory traffic of another.

    times: how often each runs. slower: a factor of each.
    """
    size = lambda kernel: kernel.weights + kernel.activations + kernel.cache / implementation.cache_speed
    seconds = [machine.seconds(flops=kernel.flops, size=size(kernel)) for kernel in kernels]
    busy = sum(map(operator.mul, seconds, slower))
    return Work(busy=times * busy, idle=times * machine.launch * sum(kernel.launches for kernel in kernels))


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
        step, bandwidth = link.step, link.bandwidth
        if link.nodes(self.ranks) > 1:
            step, bandwidth = max(step, link.network.step), min(bandwidth, link.network.bandwidth)
        return step + (self.ranks - 1) / self.rounds * self.payload / self.ranks / bandwidth

    def seconds(self, kernel: Kernel) -> float:
        size = kernel.weights + kernel.activations / self.ranks
        busy = self.times * self.machine.seconds(flops=kernel.flops / self.ranks, size=size)
        chunk = Work(busy=busy, idle=self.times * self.machine.launch * kernel.launches)
        in_round = (self.ranks - 1) / self.rounds
        several = Work(in_round * chunk.busy, in_round * chunk.idle)
        round_ = max(self.message, beside(several, wire=self.message, contention=self.machine.contention))
        return chunk.seconds + self.rounds * round_


def _in_rings(
    steps: Sequence[Step], *, work: Callable[[tuple], Work], kernels: Callable[[tuple], tuple], ring: RingProduct
) -> Timeline:
    """Every product that follows a gather or precedes a scatter in a ring; the other kernels as they are."""

    @functools.cache
    def seconds(sublayers: tuple[int, ...]) -> float:
        plain, total = 0.0, work(sublayers).seconds
        for kernel in kernels(sublayers):
            if kernel.name in (*AFTER_GATHER, *BEFORE_SCATTER):
                one = ring.times * ring.machine.seconds(flops=kernel.flops, size=kernel.weights + kernel.activations)
                plain += ring.seconds(kernel) - one - ring.times * ring.machine.launch * kernel.launches
        return total + plain

    now, bars = 0.0, []
    for step in steps:
        bars.append(Bar(NAMES[step.sublayers], now, now + seconds(step.sublayers), wire=False))
        now = bars[-1].stop
    compute = sum(work(step.sublayers).seconds for step in steps)
    wire = 2 * ring.rounds * ring.message * len(steps)
    return Timeline(seconds=now, compute=compute, wire=wire, all_reduces=len(steps), bars=tuple(bars))


def _split(program: Program, ranks: int) -> int:
    return ranks if program.form in (Form.SEQUENCE_PARALLEL, Form.COLLECTIVE_MATMUL) else 1
