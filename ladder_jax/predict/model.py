"""Predict the speed of one topology on one machine from the model's configuration."""

import dataclasses
from collections.abc import Collection, Iterable

from ladder_jax.config import ExpertParallelism, Launch, ModelConfig, Phase
from ladder_jax.predict import work
from ladder_jax.predict.implementation import OURS, Head, Implementation
from ladder_jax.predict.layers import layers, work_of
from ladder_jax.predict.link import Algorithm
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.program import PLAIN, Opponents, Program, programs
from ladder_jax.predict.timeline import Timeline
from ladder_jax.predict.work import Block, Model


@dataclasses.dataclass(frozen=True)
class Pass:
    """The time of one prefill, decode step or training step.

    seconds: total. wire: of its all-reduces. exposed: the time that all-reduces add to the total.
    sublayers: timeline of the layers, without embedding and head; None for a prediction from a schedule.
    program: the fastest one that the topology may use. all_reduce: its algorithm; None without communication.
    """

    seconds: float
    wire: float
    exposed: float
    sublayers: Timeline | None = dataclasses.field(default=None, repr=False)
    program: Program = PLAIN
    all_reduce: Algorithm | None = None

    @property
    def hidden(self) -> float:
        """The hidden share of the all-reduces' time; 0 without all-reduces."""
        return max(0.0, round(1 - self.exposed / self.wire, 12)) if self.wire else 0.0


@dataclasses.dataclass(frozen=True)
class Speed:
    """The time of generating `new_tokens` tokens in `rows` rows. memory: bytes of weights and cache on a device."""

    rows: int
    new_tokens: int
    prefill: Pass
    step: Pass
    memory: float

    @property
    def prefill_seconds(self) -> float:
        return self.prefill.seconds

    @property
    def decode_seconds(self) -> float:
        """Seconds of the G - 1 decode steps; the first token comes from the prefill."""
        return (self.new_tokens - 1) * self.step.seconds

    @property
    def exposed_seconds(self) -> float:
        return self.prefill.exposed + (self.new_tokens - 1) * self.step.exposed

    @property
    def wire_seconds(self) -> float:
        return self.prefill.wire + (self.new_tokens - 1) * self.step.wire

    @property
    def tokens_per_second(self) -> float:
        return self.rows * self.new_tokens / (self.prefill_seconds + self.decode_seconds)


def speed(
    config: ModelConfig,
    *,
    machine: Machine,
    tensor: int,
    rows: int,
    prompt_length: int = 1024,
    new_tokens: int = 512,
    implementation: Implementation = OURS,
    opponents: Opponents = Opponents.FITTED,
    launches: Collection[Launch] = tuple(Launch),
    interleaves: Collection[int] = (1, 2),
) -> Speed:
    """The speed of `config` with its residual topology over `tensor` devices, which must divide the model.

    opponents, launches, interleaves: the programs among which prefill and decode step each take the fastest.
    """
    shape = dict(rows=rows, prompt_length=prompt_length, new_tokens=new_tokens, implementation=implementation)
    model = Model(config, tensor, implementation)
    among = dict(machine=machine, opponents=opponents, launches=launches, interleaves=interleaves)
    return Speed(
        rows=rows,
        new_tokens=new_tokens,
        prefill=fastest(passes(model, work.prefill(**shape), phase=Phase.PREFILL, **among)),
        step=fastest(passes(model, work.decode_step(**shape), phase=Phase.DECODE, **among)),
        memory=model.memory(rows=rows, capacity=prompt_length + new_tokens),
    )


def passes(
    model: Model,
    block: Block,
    *,
    machine: Machine,
    phase: Phase,
    opponents: Opponents,
    launches: Collection[Launch] = tuple(Launch),
    interleaves: Collection[int] = (1, 2),
    experts: ExpertParallelism = ExpertParallelism.REDUCE,
) -> list[Pass]:
    """A prefill or decode step by each of the programs that may run it. experts: in which form."""
    candidates = programs(
        model.config,
        machine=machine,
        ranks=model.ranks,
        phase=phase,
        rows=block.rows,
        tokens=int(block.tokens),
        implementation=model.implementation,
        opponents=opponents,
        launches=launches,
        interleaves=interleaves,
        experts=experts,
    )
    return [run_by(model, machine, block, program) for program in candidates]


def fastest(candidates: Iterable[Pass]) -> Pass:
    return min(candidates, key=lambda one: one.seconds)


def run_by(model: Model, machine: Machine, block: Block, program: Program) -> Pass:
    """A prefill or decode step by `program`."""
    implementation = model.implementation
    found = layers(model, machine, block, program=program)
    ends = work_of((model.embedding(block), *model.head(block)), machine, implementation).seconds
    # All-reduces outside the sublayers, never hidden: of the embedding, and of a few bytes per row to choose the token.
    small = machine.all_reduce(4 * block.rows, ranks=model.ranks, among=program.algorithms)
    other_wire = implementation.small_all_reduces * small
    if implementation.head is Head.SHARDED:
        other_wire += found.all_reduce
    return Pass(
        seconds=found.timeline.seconds + ends + other_wire,
        wire=found.timeline.wire + other_wire,
        exposed=found.timeline.exposed + other_wire,
        sublayers=found.timeline,
        program=program,
        all_reduce=found.algorithm,
    )
