"""Predict a training step's forward and backward pass: by tensor parallelism in each form.

    step = layers forward + layers backward + head and embedding
    layers forward   the timeline of a prefill (timeline.py), each position scored
    layers backward  the same timeline in the opposite order, each sublayer twice the work: the gradients of its input
                     and of its weights, a matrix product each. One all-reduce a sublayer, of the gradient of its input,
                     as large as the forward pass's; and a sublayer whose input leaves out the newest d outputs has a
                     gradient that does without the newest d of those, so that as much is hidden. In a hybrid, the
                     gradient of a sublayer's output does without those of the next inputs that left it out.
                     Of exchanged experts it is the mirror image: a message that stands beside a half of a sublayer
                     forward returns beside that half's gradients, where barriers hold it
    two halves       in turn, forward and backward: see `timeline.play_in_turn`
    head, embedding  three times the forward pass's work; two all-reduces of the stream that nothing hides (the
                     embedding's rows, the gradient of the head's input), and three of four bytes a token in the loss

Left out, and alike for all: the optimizer, the reduction of gradients over data-parallel groups (both once a step, over
many microbatches), and recomputation. Nothing of this has been measured on several devices.
"""

import dataclasses
import itertools
from collections.abc import Collection

from ladder_jax.config import ExpertParallelism, ModelConfig, Phase
from ladder_jax.predict import implementation, work
from ladder_jax.predict.implementation import Scored
from ladder_jax.predict.layers import Layers, layers, steps_of, work_of
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.model import Pass
from ladder_jax.predict.program import PLAIN, Form, Opponents, Program, programs
from ladder_jax.predict.timeline import Timeline
from ladder_jax.predict.work import Model
from ladder_jax.residual import Desynced, Silent, Step

TRAINING = dataclasses.replace(implementation.OURS, scored=Scored.ALL, small_all_reduces=3)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Seconds of one microbatch. wire: of all its all-reduces; exposed: what those add to the step."""

    forward: Timeline
    backward: Timeline
    ends: float
    ends_wire: float

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds + self.ends + self.ends_wire

    @property
    def wire(self) -> float:
        return self.forward.wire + self.backward.wire + self.ends_wire

    @property
    def exposed(self) -> float:
        return self.forward.exposed + self.backward.exposed + self.ends_wire


def step(
    config: ModelConfig, *, machine: Machine, tensor: int, rows: int, sequence: int, program: Program = PLAIN
) -> Predicted:
    """Of `rows` x `sequence` tokens, which one tensor-parallel group of `tensor` devices computes at once.

    `config` names the topology, any but `desync`.
    """
    return _step(config, machine=machine, tensor=tensor, rows=rows, sequence=sequence, program=program)[0]


def passes(
    config: ModelConfig,
    *,
    machine: Machine,
    tensor: int,
    rows: int,
    sequence: int,
    opponents: Opponents = Opponents.STRONGEST,
    interleaves: Collection[int] = (1, 2),
    experts: ExpertParallelism = ExpertParallelism.REDUCE,
) -> list[Pass]:
    """The step by each tensor-parallel program that may run it. experts: in which form."""
    shape = dict(machine=machine, tensor=tensor, rows=rows, sequence=sequence)
    candidates = programs(
        config,
        machine=machine,
        ranks=tensor,
        phase=Phase.TRAIN,
        rows=rows,
        tokens=sequence,
        implementation=TRAINING,
        opponents=opponents,
        interleaves=interleaves,
        experts=experts,
    )
    every = []
    for program in candidates:
        found, forward = _step(config, **shape, program=program)
        every.append(Pass(found.seconds, found.wire, found.exposed, program=program, all_reduce=forward.algorithm))
    return every


def _step(
    config: ModelConfig, *, machine: Machine, tensor: int, rows: int, sequence: int, program: Program
) -> tuple[Predicted, Layers]:
    model = Model(config, tensor, TRAINING)
    block = work.prefill(rows=rows, prompt_length=sequence, new_tokens=0, implementation=TRAINING)
    steps = steps_of(config)
    forward = layers(model, machine, block, program=program)
    mirrored = steps if program.form is Form.EXCHANGE else _backward(steps)  # its sum has no order
    backward = layers(model, machine, block, program=program, steps=mirrored, times=2)
    ends = work_of((model.embedding(block), *model.head(block)), machine, TRAINING, times=3)
    small = machine.all_reduce(4 * block.size, ranks=tensor, among=program.algorithms)
    ends_wire = 2 * forward.all_reduce + TRAINING.small_all_reduces * small
    return Predicted(forward.timeline, backward.timeline, ends.seconds, ends_wire), forward


def _backward(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The sublayers from last to first, with the delays of their gradients.

    The gradient of an output is the sum of those of the inputs that hold it. So it does without the newest: of the next
    inputs, those that leave it out. What a step computes early forward, it computes with the rest backward: the
    gradients of their input are one sum.
    """
    if any(getattr(one, "early", ()) for one in steps):
        steps = tuple(dataclasses.replace(one, sublayers=one.sublayers + one.early, early=()) for one in steps)
    if isinstance(steps[0], Silent):
        return steps[::-1]
    if isinstance(steps[0], Desynced):
        raise ValueError("the backward pass of desync has no prediction")
    delays = [one.delay for one in steps]
    after = lambda place: delays[min(place, len(steps) - 1)]  # behind the last layer as in it: nothing is pending there
    left_out = [next(d for d in itertools.count() if after(place + 1 + d) <= d) for place in range(len(steps))]
    backward, pending = [], 0
    for step, delay in zip(steps, left_out):  # from the backward pass's last step
        before = max(delay, pending - 1)
        backward.append(Step(step.sublayers, before, delay, pending))
        pending = before
    return tuple(backward[::-1])
