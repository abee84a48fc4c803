"""The speed of one topology on one machine, from the configuration alone."""

import dataclasses
import functools
import itertools

from ladder_jax.config import ModelConfig
from ladder_jax.predict import work
from ladder_jax.predict.implementation import OURS, Head, Implementation
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.timeline import Played, Work, play
from ladder_jax.predict.work import Block, Kernel, Model
from ladder_jax.residual import Step, of_model


@dataclasses.dataclass(frozen=True)
class Pass:
    """One prefill or decode step. seconds: of all of it; wire: of its all-reduces; exposed: what those add to it.

    sublayers: the timeline of the layers alone, which begins when the embedding is there; None where it is not known.
    """

    seconds: float
    wire: float
    exposed: float
    sublayers: Played | None = None

    @property
    def hidden(self) -> float:
        """The share of the all-reduces' time that costs nothing; 0 where there is none."""
        return max(0.0, round(1 - self.exposed / self.wire, 12)) if self.wire else 0.0


@dataclasses.dataclass(frozen=True)
class Speed:
    """A generation of `rows` texts. memory: bytes of weights and cache on a device."""

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
        """Of the G - 1 steps after the prefill, which gives the first token."""
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
    """What `config`, its residual included, does over `tensor` devices, which must divide it."""
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
    topology, ranks, implementation = _topology(model.config), model.ranks, model.implementation

    @functools.cache
    def of_step(sublayers: tuple[int, ...]) -> Work:
        kernels = model.step(sublayers, block, shared_norm=topology.shared_norm)
        return _work(kernels, machine, implementation)

    def work_of(step: Step) -> Work:
        return of_step(step.sublayers)

    payload = model.payload(block)
    all_reduce = machine.all_reduce(payload, ranks=ranks)
    played = play(topology.steps, work=work_of, all_reduce=all_reduce, contention=machine.contention)
    ends = _work((model.embedding(block), *model.head(block)), machine, implementation).seconds
    # Besides the sublayers': the embedding's, which all else waits for, and a few bytes a row to choose the token.
    beside = implementation.small_all_reduces * machine.all_reduce(4 * block.rows, ranks=ranks)
    if implementation.head is Head.SHARDED:
        beside += all_reduce
    return Pass(
        seconds=played.seconds + ends + beside,
        wire=played.wire + beside,
        exposed=played.exposed + beside,
        sublayers=played,
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    steps: tuple[Step, ...]
    shared_norm: bool


@functools.lru_cache(maxsize=64)
def _topology(config: ModelConfig) -> _Plan:
    """Counted once for the many predictions of a sweep."""
    topology = of_model(config)
    return _Plan(tuple(itertools.chain.from_iterable(topology.layers)), topology.shared_norm)


def _work(kernels: tuple[Kernel, ...], machine: Machine, implementation: Implementation) -> Work:
    """Each kernel's busy time apart: one that computes cannot hide another that moves."""
    busy = sum(
        machine.seconds(
            flops=kernel.flops,
            size=kernel.weights + kernel.activations + kernel.cache / implementation.cache_speed,
        )
        for kernel in kernels
    )
    return Work(busy=busy, idle=machine.launch * sum(kernel.launches for kernel in kernels))
