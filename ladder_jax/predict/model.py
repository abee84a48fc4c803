"""Predict the speed of one topology on one machine from the model's configuration.

A training step is a forward and a backward pass:

    layers forward   the timeline of a prefill, each position scored
    layers backward  the same timeline in the opposite order, each sublayer twice the work: the
                     gradients of its input and of its weights, a matrix product each. One
                     all-reduce a sublayer, of the gradient of its input, as large as the forward
                     pass's; and a sublayer whose input leaves out the newest d outputs has a
                     gradient that does without the newest d of those, so that as much is hidden. In
                     a hybrid, the gradient of a sublayer's output does without those of the next
                     inputs that left it out. Of exchanged experts it is the mirror image: a message
                     that stands beside a half of a sublayer forward returns beside that half's
                     gradients, where barriers hold it
    head, embedding  three times the forward pass's work; two all-reduces of the stream that nothing
                     hides (the embedding's rows, the gradient of the head's input), and three of
                     four bytes a token in the loss

Left out, and alike for all: the optimizer, the reduction of gradients over data-parallel groups
(both once a step, over many microbatches), and recomputation. `ladder-jax plan` adds them. Nothing
of this has been measured on several devices.

Without tensor parallelism every device computes rows of its own, with all columns:

    data-parallel  every device holds all weights: nothing is transferred
    fsdp           weights are split over the devices. Each layer's are gathered while the layer before it computes,
                   and once more in the backward pass, beside which gradients (float32) are reduce-scattered

    forward   gather + (L - 1) x (a layer beside the next one's gather) + a layer
    backward  the same with twice the work, and the gradients' scatter beside the gather; the last
              scatter is bare, on a v5e each
    ends      head and embedding, their tables' transfers bare

It must have rows to share, and memory. data-parallel: 16 bytes a parameter in training (values, two
moments and gradients in float32), 2 in a prefill. fsdp: two layers' weights, gathered, with their
gradients in training, beside a device's share of a prefill's weights. Not counted is what tensor
parallelism needs as well: a device's share of the training state, which may be split over more
devices than these, and activations, of as many tokens as under sequence parallelism.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

from ladder_jax.config import ModelConfig, Phase
from ladder_jax.predict.layers import kernels_of_layers, layers, reduction
from ladder_jax.predict.machine import Algorithm, Halves, Machine
from ladder_jax.predict.program import (
    PLAIN,
    Choice,
    Form,
    Program,
    programs,
    steps_of,
)
from ladder_jax.predict.timeline import Slot, Timeline, Work, play_slots
from ladder_jax.predict.work import (
    FLOAT32,
    NO_RECOMPUTE,
    Model,
    Task,
)
from ladder_jax.residual import Step
from ladder_jax.residual.wires.desync import Desynced, Silent
from ladder_jax.schedule import models

STATE = 16  # bytes a parameter in training


@dataclasses.dataclass(frozen=True)
class Pass:
    """The time of one prefill, decode step or training step.

    seconds: total. wire: of its all-reduces. exposed: the time that all-reduces add to the total.
    program: the fastest one that the topology may use. all_reduce: its algorithm; None without
        communication.
    """

    seconds: float
    wire: float
    exposed: float
    program: Program = PLAIN
    all_reduce: Algorithm | None = None

    @property
    def hidden(self) -> float:
        """The hidden share of the all-reduces' time; 0 without all-reduces."""
        return max(0.0, round(1 - self.exposed / self.wire, 12)) if self.wire else 0.0

    @property
    def form(self) -> str:
        return self.program.form.value

    @property
    def interleave(self) -> int:
        return self.program.interleave

    @property
    def executed(self) -> dict[str, str | None]:
        """How it communicates, as JSON."""
        launch = self.program.launch
        return {
            "all_reduce": self.all_reduce.value if self.all_reduce else None,
            "launch": launch.value if launch and self.wire else None,
        }


@dataclasses.dataclass(frozen=True)
class Speed:
    """The time of generating `new_tokens` tokens in `rows` rows. memory: bytes of weights and cache
    on a device.
    """

    rows: int
    new_tokens: int
    prefill: Pass
    step: Pass
    memory: float

    @property
    def form(self) -> str:
        """Where the stream lies; the prefill may have another form than the decode steps."""
        prefill = self.prefill.form
        return prefill if prefill == self.step.form else f"{self.step.form}; prefill: {prefill}"

    @property
    def interleave(self) -> dict[str, int]:
        return {"prefill": self.prefill.interleave, "step": self.step.interleave}

    @property
    def executed(self) -> dict[str, str | None]:
        """Of a decode step."""
        return self.step.executed

    @property
    def decode_seconds(self) -> float:
        """Seconds of the G - 1 decode steps; the first token comes from the prefill."""
        return (self.new_tokens - 1) * self.step.seconds

    @property
    def seconds(self) -> float:
        return self.prefill.seconds + self.decode_seconds

    @property
    def exposed(self) -> float:
        return self.prefill.exposed + (self.new_tokens - 1) * self.step.exposed

    @property
    def wire(self) -> float:
        return self.prefill.wire + (self.new_tokens - 1) * self.step.wire

    @property
    def tokens_per_second(self) -> float:
        return self.rows * self.new_tokens / self.seconds


def speed(
    config: ModelConfig,
    *,
    machine: Machine,
    tensor: int,
    rows: int,
    prompt_length: int = 1024,
    new_tokens: int = 512,
    implementation: type[Model] = Model,
    by: Program | Choice = PLAIN,
) -> Speed:
    """The speed of `config` with its residual topology over `tensor` devices, which must divide the
    model.

    by: the program of prefill and decode step, or those among which each takes the fastest.
    """
    model = implementation(config, tensor)
    shape = dict(rows=rows, prompt_length=prompt_length, new_tokens=new_tokens)
    prefill = Task(model, machine, model.prefill(**shape))
    step = Task(model, machine, model.decode_step(**shape))
    return Speed(
        rows,
        new_tokens,
        fastest(passes(prefill, phase=Phase.PREFILL, by=by)),
        fastest(passes(step, phase=Phase.DECODE, by=by)),
        memory=model.memory(rows=rows, capacity=prompt_length + new_tokens),
    )


def passes(task: Task, *, phase: Phase, by: Program | Choice) -> list[Pass]:
    """A prefill, decode step or training step by a tensor-parallel program, or by each of those
    that may run it.
    """
    candidates = [by] if isinstance(by, Program) else programs(task, phase=phase, choice=by)
    return [run_by(task, program) for program in candidates]


def fastest(candidates: Iterable[Pass]) -> Pass:
    """Of equally fast ones the first."""
    return min(candidates, key=lambda one: round(one.seconds, 12))


def run_by(task: Task, program: Program) -> Pass:
    """A prefill, decode step or, where the model trains, training step by `program`; the backward
    pass recomputes what the task does.
    """
    model = task.model
    forward = dataclasses.replace(task, recompute=NO_RECOMPUTE)
    timelines = [layers(forward, program)]
    if model.trains:
        steps = steps_of(model.config)
        # a sum of slots has no order
        steps = steps if program.form is Form.EXCHANGE else backward(steps)
        timelines.append(layers(dataclasses.replace(task, times=2), program, steps=steps))
    # All-reduces outside the sublayers, never hidden: of the stream, and of a few bytes for each
    # scored position.
    algorithm, all_reduce = reduction(forward, program)
    bare = 0.0
    link = task.machine.link
    if link is not None and not model.replicated_head:
        scores = 4 * model.scored(task.block)
        small = link.all_reduce(scores, ranks=model.ranks, among=program.algorithms)
        bare = (2 * all_reduce + 3 * small) if model.trains else (all_reduce + 2 * small)
    return pass_of(
        timelines,
        ends=task.ends(),
        bare=bare,
        program=program,
        all_reduce=algorithm if timelines[0].wire else None,
    )


def pass_of(
    timelines: Sequence[Timeline],
    *,
    ends: float,
    bare: float,
    program: Program,
    all_reduce: Algorithm | None = None,
) -> Pass:
    """timelines: of the layers forward, and backward. ends: seconds of the compute outside of them.
    bare: of the transfers there, which nothing hides.
    """
    total = lambda name: sum(getattr(one, name) for one in timelines)
    times = total("seconds") + ends + bare, total("wire") + bare, total("exposed") + bare
    return Pass(*times, program, all_reduce)


@functools.lru_cache(maxsize=64)  # as `layers_of`
def backward(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The sublayers from last to first, with the delays of their gradients.

    The gradient of an output is the sum of those of the inputs that hold it. So it does without the
    newest: of the next inputs, those that leave it out. What a step computes early forward, it
    computes with the rest backward: the gradients of their input are one sum. Where ranks drift
    apart (desync; only `plan` asks for it) there is an all-reduce for each one forward.
    """
    if isinstance(steps[0], Silent | Desynced):
        return steps[::-1]
    delays = [one.delay for one in steps]
    # behind the last layer as in it: nothing is pending there
    after = lambda place: delays[min(place, len(steps) - 1)]
    found = []
    pending = 0
    for place, step in enumerate(steps):  # from the backward pass's last step
        left_out = next(d for d in itertools.count() if after(place + 1 + d) <= d)
        before = max(left_out, pending - 1)
        found.append(Step(step.sublayers + step.early, before, left_out, pending))
        pending = before
    return tuple(found[::-1])


def passes_without_tensor(
    model: Model, machine: Machine, *, devices: int, rows: int, tokens: int
) -> list[Pass]:
    """The step of `rows` x `tokens` tokens by each mesh that has rows to share, and memory for the
    weights.

    model: on one rank.
    """
    if devices == 1 or rows % devices:
        return []
    size = model.element_bytes
    task = Task(model, machine, model.prefill(rows=rows // devices, prompt_length=tokens))
    largest = 2 * models.largest_layer(model.config, ranks=1)
    half = lambda size: machine.link.half(size, ranks=devices)
    fsdp = split_weights(task, half)
    alone = model.parameters * (STATE if model.trains else size)
    beside = largest * FLOAT32 if model.trains else model.parameters * size / devices
    split = largest * size + beside
    possible = []
    if alone <= machine.memory:
        computed = fsdp.seconds - fsdp.exposed
        possible.append(Pass(computed, 0.0, 0.0, Program(Form.DATA_PARALLEL)))
    if split <= machine.memory:
        possible.append(fsdp)
    return possible


def split_weights(task: Task, half: Callable[[float], float]) -> Pass:
    """Where weights are split: each layer beside the next one's gather; the tables' transfers are
    hidden by nothing.

    half: seconds of a gather or a scatter of so many bytes. The layers' sums over tensor ranks are
    left out.
    """
    tables = task.model.tables
    gathered = half(tables * task.model.element_bytes)
    timelines = [_beside_gathers(dataclasses.replace(task, recompute=NO_RECOMPUTE), half)]
    bare = gathered
    if task.model.trains:
        timelines.append(_beside_gathers(dataclasses.replace(task, times=2), half))
        bare += gathered + half(tables * FLOAT32)
    return pass_of(timelines, ends=task.ends(), bare=bare, program=Program(Form.FSDP))


def _beside_gathers(task: Task, half: Callable[[float], float]) -> Timeline:
    """Each layer beside the next one's gather. Backward, from the last layer, gradients are
    scattered beside that too.
    """
    gradients = task.times == 2
    found = []  # of each layer its work, and its matrices' elements
    for count, kind, kernels in kernels_of_layers(task.model, task.block):
        found += count * [(task.work(kernels), kind.shard.attention + kind.shard.mlp)]
    if gradients:
        found.reverse()
    slots = []
    work = Work()
    scatter = 0.0
    for following, elements in found:
        gather = half(elements * task.model.element_bytes)
        if task.machine.link.halves is Halves.NONE:
            slots += [Slot(work, [gather]), Slot(transfers=[scatter])]
        else:
            slots.append(Slot(work, [gather + scatter]))
        work = following
        scatter = half(elements * FLOAT32) if gradients else 0.0
    slots += [Slot(work), Slot(transfers=[scatter])]
    return play_slots(slots, contention=task.machine.contention)
