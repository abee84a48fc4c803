"""Predict the speed of one topology on one machine from the model's configuration."""

import dataclasses
import functools
import itertools

from ladder_jax.config import ModelConfig
from ladder_jax.predict import work
from ladder_jax.predict.implementation import OURS, Head, Implementation
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.timeline import Timeline, Work, play
from ladder_jax.predict.work import Block, Kernel, Model
from ladder_jax.residual import Step, of_model


@dataclasses.dataclass(frozen=True)
class Pass:
    """The time of one prefill or decode step.

    seconds: total. wire: of its all-reduces. exposed: the time that all-reduces add to the total.
    sublayers: timeline of the layers, without embedding and head; None for a prediction from a schedule.
    """

    seconds: float
    wire: float
    exposed: float
    sublayers: Timeline | None = dataclasses.field(default=None, repr=False)

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
) -> Speed:
    """The speed of `config` with its residual topology over `tensor` devices, which must divide the model."""
    shape = dict(rows=rows, prompt_length=prompt_length, new_tokens=new_tokens, implementation=implementation)
    model = Model(config, tensor, implementation)
    return Speed(
        rows=rows,
        new_tokens=new_tokens,
        prefill=_pass(model, machine, work.prefill(**shape)),
        step=_pass(model, machine, work.decode_step(**shape)),
        memory=model.memory(rows=rows, capacity=prompt_length + new_tokens),
    )


def _pass(model: Model, machine: Machine, block: Block) -> Pass:
    plan, ranks, implementation = _plan(model.config), model.ranks, model.implementation

    @functools.cache
    def work_of_sublayers(sublayers: tuple[int, ...]) -> Work:
        kernels = model.step(sublayers, block, shared_norm=plan.shared_norm)
        return _work(kernels, machine, implementation)

    def work_of(step: Step) -> Work:
        return work_of_sublayers(step.sublayers)

    payload = model.payload(block)
    all_reduce = machine.all_reduce(payload, ranks=ranks)
    timeline = play(plan.steps, work=work_of, all_reduce=all_reduce, contention=machine.contention)
    ends = _work((model.embedding(block), *model.head(block)), machine, implementation).seconds
    # All-reduces outside the sublayers, never hidden: of the embedding, and of a few bytes per row to choose the token.
    other_wire = implementation.small_all_reduces * machine.all_reduce(4 * block.rows, ranks=ranks)
    if implementation.head is Head.SHARDED:
        other_wire += all_reduce
    return Pass(
        seconds=timeline.seconds + ends + other_wire,
        wire=timeline.wire + other_wire,
        exposed=timeline.exposed + other_wire,
        sublayers=timeline,
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    steps: tuple[Step, ...]
    shared_norm: bool


@functools.lru_cache(maxsize=64)
def _plan(config: ModelConfig) -> _Plan:
    """The topology's steps. Cached, because a sweep predicts the same configuration many times."""
    topology = of_model(config)
    return _Plan(tuple(itertools.chain.from_iterable(topology.layers)), topology.shared_norm)


def _work(kernels: tuple[Kernel, ...], machine: Machine, implementation: Implementation) -> Work:
    """The sum of the kernels' times: the compute of one kernel cannot hide the memory traffic of another."""
    busy = sum(
        machine.seconds(
            flops=kernel.flops,
            size=kernel.weights + kernel.activations + kernel.cache / implementation.cache_speed,
        )
        for kernel in kernels
    )
    return Work(busy=busy, idle=machine.launch * sum(kernel.launches for kernel in kernels))
