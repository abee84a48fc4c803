"""A scheduled program played through: when each operation would compute, and when the wire would be busy.

An estimate: without latencies to look at and not to quote; with a machine's own (`wire`, launches, contention) the
compiled half of `ladder-jax predict`. The device computes one operation after another in issue
order. An operation takes what the compiler estimates, in cycles of the device's clock; where it
estimates nothing (GPUs, kernels) the longer of its FLOPs at the published peak and its bytes at the
published bandwidth. A collective over n devices takes its bytes over the published link, 2 (n-1)/n of them
for an all-reduce, (n-1)/n for a reduce-scatter, n-1 for an all-gather (of a share each), from when it is
issued and the wire is free; a `done` waits for it.
"""

import dataclasses
from collections.abc import Callable

from ladder_jax.hardware import Hardware
from ladder_jax.schedule import collectives, hlo
from ladder_jax.schedule.collectives import Collective
from ladder_jax.schedule.cost import Costs, token_loop, turns
from ladder_jax.schedule.hlo import Computation, Instruction, Program

FREE = (
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "copy-start", "copy-done", "slice-start",
    "slice-done", "call-start", "call-update", "call-done", "after-all", "partition-id", "iota",
)  # fmt: skip
"""Operations that take no time of the compute units: bookkeeping, and copies that run beside them."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """start, stop: seconds from the program's begin. wire: it occupies the link, not the compute units."""

    name: str
    op_name: str
    start: float
    stop: float
    wire: bool
    turn: int = 0  # of the loop that it stands in


def play(
    program: Program,
    *,
    hardware: Hardware,
    ranks: int,
    wire: Callable[[Collective], float] | None = None,
    launch: float = 0.0,
    contention: float = 0.0,
) -> list[Bar]:
    """All bars that take time, in the order of their begin.

    ranks: of collectives that do not say theirs.
    wire: seconds of a collective, in place of its bytes over the published link; launch: seconds more for each
    operation; contention: how much longer an operation takes while a collective is in flight.
    """
    player = _Player(program, hardware, wire or _published(hardware, ranks), launch, contention)
    player.run(program.entry, turn=0)
    return sorted(player.bars, key=lambda bar: bar.start)


class _Player:
    def __init__(self, program: Program, hardware: Hardware, wire: Callable, launch: float, contention: float):
        self.program, self.hardware, self.wire = program, hardware, wire
        self.launch, self.contention = launch, contention
        self.costs = Costs(program)
        loop = token_loop(program)
        self.tokens = 1 if loop is None else turns(loop, within=program.entry, program=program)
        self.bars: list[Bar] = []
        self.now = self.wire_free = 0.0
        self.found: dict[str, list[Collective]] = {}
        for collective in collectives.find(program, costs=self.costs):
            self.found.setdefault(collective.computation, []).append(collective)

    def run(self, computation: Computation, *, turn: int) -> None:
        issued = {c.issued: c for c in self.found.get(computation.name, ())}
        awaited = {c.awaited: c for c in self.found.get(computation.name, ())}
        arrival: dict[str, float] = {}
        for index, instruction in enumerate(computation.instructions):
            if index in issued:
                arrival[issued[index].name] = self._send(issued[index], turn)
            if index in awaited:
                self.now = max(self.now, arrival[awaited[index].name])
            if index not in issued and index not in awaited:
                self._compute(instruction, computation, turn)

    def _send(self, collective: Collective, turn: int) -> float:
        start = max(self.now, self.wire_free)
        self.wire_free = start + self.wire(collective)
        self.bars.append(Bar(collective.name, collective.op_name, start, self.wire_free, wire=True, turn=turn))
        return self.wire_free

    def _compute(self, instruction: Instruction, computation: Computation, turn: int) -> None:
        if instruction.opcode == "while":
            body = self.program.computations[instruction.attribute("body").lstrip("%")]
            for index in range(self.costs.trips(body.name) // max(1, self.costs.trips(computation.name))):
                self.run(body, turn=index)
        elif instruction.opcode == "call":
            for name in instruction.calls:
                self.run(self.program.computations[name], turn=turn)
        elif instruction.opcode not in FREE:
            seconds = self.launch + self._slowed(self._seconds(instruction, computation))
            if computation.entry:  # around the loop over tokens, which share it
                seconds /= self.tokens
            self.bars.append(
                Bar(instruction.name, instruction.op_name, self.now, self.now + seconds, wire=False, turn=turn)
            )
            self.now += seconds

    def _slowed(self, seconds: float) -> float:
        """Until the link is free it takes 1 + contention times as long."""
        window, slower = max(0.0, self.wire_free - self.now), 1 + self.contention
        return seconds * slower if seconds * slower <= window else seconds + window * (1 - 1 / slower)

    def _seconds(self, instruction: Instruction, computation: Computation) -> float:
        cycles = self.costs.cycles(instruction, within=computation)
        if cycles is not None and self.hardware.clock:
            return cycles / self.hardware.clock
        flops = sum(self.costs.matmul_flops(instruction, within=computation).values())
        arrays = [a for name in instruction.operands for a in computation.by_name[name].arrays]
        moved = hlo.size_in_bytes((*arrays, *instruction.arrays))
        return max(flops / self.hardware.flops, moved / self.hardware.bandwidth)


def _published(hardware: Hardware, ranks: int) -> Callable[[Collective], float]:
    def seconds(collective: Collective) -> float:
        count = collective.ranks or ranks
        rounds = {"all-reduce": 2, "all-gather": count}.get(collective.kind, 1)
        return rounds * (count - 1) / count * collective.bytes / hardware.link

    return seconds
