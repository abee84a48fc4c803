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

import dataclasses
from collections.abc import Callable

from ladder_jax.hardware import Hardware
from ladder_jax.schedule import collectives, hlo
from ladder_jax.schedule.collectives import Collective
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
    costs = Costs(program, experts=experts)
    player = _Player(program, costs, hardware, wire or _published(hardware, ranks), launch, contention)
    player.run(program.entry, iteration=0)
    return sorted(player.bars, key=lambda bar: bar.start)


class _Player:
    def __init__(
        self, program: Program, costs: Costs, hardware: Hardware, wire: Callable, launch: float, contention: float
    ):
        self.program, self.costs, self.hardware, self.wire = program, costs, hardware, wire
        self.launch, self.contention = launch, contention
        loop = token_loop(program)
        self.tokens = 1 if loop is None else iterations(loop)
        self.bars: list[Bar] = []
        self.now = self.wire_free = 0.0
        self.collectives: dict[str, list[Collective]] = {}
        for collective in collectives.find(program, costs=self.costs):
            self.collectives.setdefault(collective.computation, []).append(collective)

    def run(self, computation: Computation, *, iteration: int) -> None:
        issued = {c.issued: c for c in self.collectives.get(computation.name, ())}
        awaited = {c.awaited: c for c in self.collectives.get(computation.name, ())}
        arrival: dict[str, float] = {}
        for index, instruction in enumerate(computation.instructions):
            if index in issued:
                arrival[issued[index].name] = self._send(issued[index], iteration)
            if index in awaited:
                self.now = max(self.now, arrival[awaited[index].name])
            if index not in issued and index not in awaited:
                self._compute(instruction, computation, iteration)

    def _send(self, collective: Collective, iteration: int) -> float:
        start = max(self.now, self.wire_free)
        self.wire_free = start + self.wire(collective)
        bar = Bar(collective.name, collective.op_name, start, self.wire_free, wire=True, iteration=iteration)
        self.bars.append(bar)
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
            bar = Bar(instruction.name, instruction.op_name, start, self.now, wire=False, iteration=iteration)
            self.bars.append(bar)

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
        moved = sum(hlo.size_in_bytes(one.arrays) for one in (*instruction.operands, instruction))
        return max(flops / self.hardware.flops, moved / self.hardware.bandwidth)


def _published(hardware: Hardware, ranks: int) -> Callable[[Collective], float]:
    def seconds(collective: Collective) -> float:
        count = collective.ranks or ranks
        if collective.kind == "collective-permute":
            return collective.bytes / hardware.link
        rounds = {"all-reduce": 2, "all-gather": count}.get(collective.kind, 1)
        return rounds * (count - 1) / count * collective.bytes / hardware.link

    return seconds
