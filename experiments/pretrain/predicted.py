"""Predicted seconds of a training step's forward and backward pass, by `ladder-jax predict`'s constants.

    step = layers forward + layers backward + head and embedding
    layers forward   the timeline that `predict` plays for a prefill (predict/timeline.py), each position scored
    layers backward  the same timeline in the opposite order, each sublayer twice the work: the gradients of its input
                     and of its weights, a matrix product each. One all-reduce a sublayer, of the gradient of its input,
                     as large as the forward pass's; and a sublayer whose input leaves out the newest d outputs has a
                     gradient that does without the newest d of those, so that as much is hidden.
    head, embedding  three times the forward pass's work; two all-reduces of the stream that nothing hides (the
                     embedding's rows, the gradient of the head's input), and three of four bytes a token in the loss

Left out, and alike for all topologies: the optimizer, the reduction of gradients over data-parallel groups (both once a
step, over many microbatches), and recomputation. Nothing of this has been measured on several devices.
"""

import dataclasses
import itertools

from ladder_jax.config import ModelConfig
from ladder_jax.predict import implementation, work
from ladder_jax.predict.implementation import Implementation, Scored
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.timeline import Timeline, Work, play
from ladder_jax.predict.work import Kernel, Model
from ladder_jax.residual import Step, of_model

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


def step(config: ModelConfig, *, machine: Machine, tensor: int, rows: int, sequence: int) -> Predicted:
    """Of `rows` x `sequence` tokens, which one tensor-parallel group of `tensor` devices computes at once.

    `config` names the topology; all its layers must be of one kind.
    """
    model = Model(config, tensor, TRAINING)
    block = work.prefill(rows=rows, prompt_length=sequence, new_tokens=0, implementation=TRAINING)
    topology = of_model(config)
    steps = tuple(itertools.chain.from_iterable(topology.layers))
    all_reduce = machine.all_reduce(model.payload(block), ranks=tensor)

    def played(order: tuple[Step, ...], *, times: int) -> Timeline:
        def of_step(one: Step) -> Work:
            kernels = model.step(one.sublayers, block, shared_norm=topology.shared_norm)
            return _work(kernels, machine, TRAINING, times=times)

        return play(order, work=of_step, all_reduce=all_reduce, contention=machine.contention)

    ends = _work((model.embedding(block), *model.head(block)), machine, TRAINING, times=3)
    small = machine.all_reduce(4 * block.size, ranks=tensor)
    return Predicted(
        forward=played(steps, times=1),
        backward=played(_backward(steps), times=2),
        ends=ends.seconds,
        ends_wire=2 * all_reduce + TRAINING.small_all_reduces * small,
    )


def _backward(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The sublayers from last to first; how many sums a step does without depends on its place, not on its sublayer."""
    if len({dataclasses.replace(one, sublayers=()) for one in steps}) > 1:
        raise ValueError("a hybrid's backward pass is not the mirror image of its forward pass")
    return tuple(dataclasses.replace(one, sublayers=other.sublayers) for one, other in zip(steps, steps[::-1]))


def _work(kernels: tuple[Kernel, ...], machine: Machine, how: Implementation, *, times: int) -> Work:
    """Each kernel `times` over: one that computes cannot hide another that moves."""
    moved = lambda k: k.weights + k.activations + k.cache / how.cache_speed
    busy = sum(machine.seconds(flops=k.flops, size=moved(k)) for k in kernels)
    return Work(busy=times * busy, idle=times * machine.launch * sum(k.launches for k in kernels))
