"""Simulate a scheduled program: estimate when each operation computes, and when each collective uses the link.

The device computes one operation after another, in issue order.

    operation   the compiler's cycles over the device's clock; if it gives none (GPUs, kernels), the longer of
                FLOPs / published peak and bytes / published bandwidth (of grouped matmuls: see grouped.py; of a kernel
                of attention the FLOPs are those of `cost.attention_kernel_flops`)
    collective  bytes / published link, times 2 (n-1)/n for an all-reduce over n devices, (n-1)/n for a
                reduce-scatter, n-1 for an all-gather (of one shard each), 1 for a permute; it starts when it has been
                issued and the link is free, and its `done` waits for its end

By default there are no latencies: `ladder-jax overlap --plot` draws these times, and nobody should quote them. With a
machine's constants (`wire`, `launch`, `contention`) this is `ladder-jax predict --from-schedule`.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping

from ladder_jax.hardware import Hardware
from ladder_jax.schedule.collectives import Collective, find
from ladder_jax.schedule.cost import Costs, attention_kernel_flops, iterations, token_loop
from ladder_jax.schedule.grouped import Experts
from ladder_jax.schedule.hlo import Computation, Instruction, Program

FREE = (
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "copy-start", "copy-done", "slice-start",
    "slice-done", "call-start", "call-update", "call-done", "after-all", "partition-id", "iota",
)  # fmt: skip
"""Operations that take no compute time: bookkeeping, and asynchronous copies."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """start, stop: seconds since the program's start. wire: whether it uses the link, not the compute units."""

    name: str
    op_name: str
    start: float
    stop: float
    wire: bool
    iteration: int = 0  # of the loop that contains it


def play(
    program: Program,
    *,
    hardware: Hardware,
    ranks: int,
    wire: Callable[[Collective], float] | None = None,
    launch: float = 0.0,
    contention: float = 0.0,
    experts: Experts | None = None,
) -> list[Bar]:
    """All bars, sorted by their start.

    ranks: number of devices of a collective whose group is unknown.
    wire(collective): its seconds; by default its bytes over the published link.
    launch: seconds added to each operation.
    contention: relative slowdown of an operation while a collective is in flight (0.5: half as long again).
    experts: the model's (see `cost.Costs`).
    """
    costs, loop = Costs(program, experts=experts), token_loop(program)
    found = collections.defaultdict(list)
    for collective in find(program, costs=costs):
        found[collective.computation].append(collective)
    sent = wire or functools.partial(_published, hardware=hardware, ranks=ranks)
    tokens = 1 if loop is None else iterations(loop)
    player = _Player(costs, hardware, sent, launch, contention, tokens, found)
    player.run(program.entry, iteration=0)
    return sorted(player.bars, key=lambda bar: bar.start)


@dataclasses.dataclass
class _Player:
    costs: Costs
    hardware: Hardware
    wire: Callable[[Collective], float]
    launch: float
    contention: float
    tokens: int
    collectives: Mapping[str, list[Collective]]  # by the computation's name
    bars: list[Bar] = dataclasses.field(default_factory=list)
    now: float = 0.0
    wire_free: float = 0.0

    def run(self, computation: Computation, *, iteration: int) -> None:
        issued = {c.issued: c for c in self.collectives[computation.name]}
        awaited = {c.awaited: c.name for c in issued.values()}
        arrival: dict[str, float] = {}
        for index, instruction in enumerate(computation.instructions):
            if index in issued:
                arrival[issued[index].name] = self._send(issued[index], iteration)
            if index in awaited:
                self.now = max(self.now, arrival[awaited[index]])
            if index not in issued and index not in awaited:
                self._compute(instruction, computation, iteration)

    def _send(self, collective: Collective, iteration: int) -> float:
        start = max(self.now, self.wire_free)
        self.wire_free = start + self.wire(collective)
        self.bars.append(Bar(collective.name, collective.op_name, start, self.wire_free, True, iteration))
        return self.wire_free

    def _compute(self, instruction: Instruction, computation: Computation, iteration: int) -> None:
        if instruction.opcode == "while":
            (body,) = instruction.calls
            for index in range(self.costs.trips(body) // max(1, self.costs.trips(computation))):
                self.run(body, iteration=index)
        elif instruction.opcode == "call":
            for called in instruction.calls:
                self.run(called, iteration=iteration)
        elif instruction.opcode not in FREE:
            seconds = self.launch + self._slowed(self._seconds(instruction))
            if computation.entry:  # outside the loop over tokens: its time is shared by all tokens
                seconds /= self.tokens
            start, self.now = self.now, self.now + seconds
            self.bars.append(Bar(instruction.name, instruction.op_name, start, self.now, False, iteration))

    def _slowed(self, seconds: float) -> float:
        """The time of an operation that is 1 + contention times slower until the link is free."""
        window, slower = max(0.0, self.wire_free - self.now), 1 + self.contention
        return seconds * slower if seconds * slower <= window else seconds + window * (1 - 1 / slower)

    def _seconds(self, instruction: Instruction) -> float:
        cycles = self.costs.cycles(instruction)
        if cycles is not None and self.hardware.clock:
            return cycles / self.hardware.clock
        if one := self.costs.grouped(instruction):
            return one.seconds(self.hardware)
        flops = self.costs.matmul_flops(instruction).total() + attention_kernel_flops(instruction)
        moved = sum(one.bytes for one in (*instruction.operands, instruction))
        return max(flops / self.hardware.flops, moved / self.hardware.bandwidth)


def _published(collective: Collective, *, hardware: Hardware, ranks: int) -> float:
    count = collective.ranks or ranks
    if collective.kind == "collective-permute":
        return collective.bytes / hardware.link
    rounds = {"all-reduce": 2, "all-gather": count}.get(collective.kind, 1)
    return rounds * (count - 1) / count * collective.bytes / hardware.link
