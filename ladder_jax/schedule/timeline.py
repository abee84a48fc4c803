"""Simulate a scheduled program: estimate when each operation computes, and when each collective
uses the link.

The device computes one operation after another, in issue order.

    operation   the compiler's cycles over the device's clock; if it gives none (GPUs, kernels), the
                longer of FLOPs / published peak and bytes moved in main memory / published
                bandwidth (of grouped matmuls: see grouped.py; of a kernel of attention the FLOPs
                are those of `cost.attention_kernel_flops`)
    collective  bytes / published link, times 2 (n-1)/n for an all-reduce over n devices, (n-1)/n
                for a reduce-scatter, n-1 for an all-gather (of one shard each), 1 for a permute; it
                starts when it has been issued and the link is free, and its `done` waits for its
                end

There are no latencies: `ladder-jax overlap` draws these times, and nobody should quote them.
"""

import dataclasses

from ladder_jax.hardware import Hardware
from ladder_jax.schedule.collectives import Collective, find
from ladder_jax.schedule.cost import BOOKKEEPING, Costs, attention_kernel_flops, trip_count
from ladder_jax.schedule.grouped import Experts
from ladder_jax.schedule.hlo import Computation, Instruction, Program

FREE = BOOKKEEPING | set(
    "copy-start copy-done slice-start slice-done call-start call-update call-done iota".split()
)
"""Operations that take no compute time: bookkeeping, and asynchronous copies."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """start, stop: seconds since the program's start. wire: whether it uses the link, not the
    compute units.
    """

    name: str
    op_name: str
    start: float
    stop: float
    wire: bool


def play(
    program: Program, *, hardware: Hardware, ranks: int, experts: Experts | None = None
) -> list[Bar]:
    """All bars, sorted by their start.

    ranks: number of devices of a collective whose group is unknown.
    experts: the model's (see `cost.Costs`).
    """
    costs = Costs(program, experts=experts)
    player = _Player(costs, hardware, ranks, find(costs))
    player.run(program.entry)
    return sorted(player.bars, key=lambda bar: bar.start)


@dataclasses.dataclass
class _Player:
    costs: Costs
    hardware: Hardware
    ranks: int
    collectives: list[Collective]
    bars: list[Bar] = dataclasses.field(default_factory=list)
    now: float = 0.0
    wire_free: float = 0.0

    def run(self, computation: Computation) -> None:
        issued = {c.issued: c for c in self.collectives if c.computation == computation.name}
        arrivals: dict[int, float] = {}  # by the position where each is awaited
        for index, instruction in enumerate(computation.instructions):
            if sent := issued.get(index):
                arrivals[sent.awaited] = self._send(sent)
            if index in arrivals:
                self.now = max(self.now, arrivals[index])
            elif not sent:
                self._compute(instruction)

    def _send(self, collective: Collective) -> float:
        start = max(self.now, self.wire_free)
        self.wire_free = start + self._wire_seconds(collective)
        self.bars.append(Bar(collective.name, collective.op_name, start, self.wire_free, wire=True))
        return self.wire_free

    def _compute(self, instruction: Instruction) -> None:
        if instruction.opcode in ("while", "call"):
            for _ in range(trip_count(instruction)):
                for called in instruction.calls:
                    self.run(called)
        elif instruction.opcode not in FREE:
            start = self.now
            self.now += self._seconds(instruction)
            self.bars.append(
                Bar(instruction.name, instruction.op_name, start, self.now, wire=False)
            )

    def _seconds(self, instruction: Instruction) -> float:
        cycles = self.costs.cycles(instruction)
        if cycles and self.hardware.clock:
            return cycles / self.hardware.clock
        if one := self.costs.grouped(instruction):
            return one.seconds(self.hardware)
        flops = self.costs.flops_of([instruction]).total() + attention_kernel_flops(instruction)
        moved = self.costs.moved(instruction)
        return max(flops / self.hardware.flops, moved / self.hardware.bandwidth)

    def _wire_seconds(self, collective: Collective) -> float:
        seconds = collective.bytes / self.hardware.link
        if collective.kind == "collective-permute":
            return seconds
        count = collective.ranks or self.ranks
        rounds = {"all-reduce": 2, "all-gather": count}.get(collective.kind, 1)
        return rounds * (count - 1) / count * seconds
