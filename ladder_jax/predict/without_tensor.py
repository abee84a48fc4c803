"""Predict the opponent without tensor parallelism: every device computes rows of its own, with all columns.

    data-parallel  every device holds all weights: nothing is transferred
    fsdp           weights are split over the devices. Each layer's are gathered while the layer before it computes,
                   and once more in the backward pass, beside which gradients (float32) are reduce-scattered

    forward   gather + (L - 1) x (a layer beside the next one's gather) + a layer
    backward  the same with twice the work, and the gradients' scatter beside the gather; the last scatter is bare
    ends      head and embedding, their tables' transfers bare

It must have rows to share, and memory. data-parallel: 16 bytes a parameter in training (values, two moments and
gradients in float32), 2 in a prefill. fsdp: two layers' weights, gathered, with their gradients in training, beside a
device's share of a prefill's weights. Not counted is what tensor parallelism needs as well: a device's share of the
training state, which may be split over more devices than these, and activations, of as many tokens as under sequence
parallelism.
"""

import dataclasses
from collections.abc import Callable

from ladder_jax.config import Phase
from ladder_jax.predict.layers import work
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.model import Pass, pass_of
from ladder_jax.predict.program import Form, Program
from ladder_jax.predict.timeline import Slot, Timeline, Work, play_slots
from ladder_jax.predict.work import ATTENTION, FLOAT32, MLP, Block, Model
from ladder_jax.schedule import shards

STATE = 16  # bytes a parameter in training


def passes(model: Model, machine: Machine, *, devices: int, rows: int, tokens: int, phase: Phase) -> list[Pass]:
    """The step of `rows` x `tokens` tokens by each mesh that has rows to share, and memory for the weights.

    model: on one rank.
    """
    if devices == 1 or rows % devices:
        return []
    config = model.config
    size = model.element_bytes
    trains = phase is Phase.TRAIN
    block = model.prefill(rows=rows // devices, prompt_length=tokens)
    tables = (1 if config.tie_embeddings else 2) * model.shard.vocabulary * config.d_model
    parameters = shards.layers(config, ranks=1) + tables
    largest = 2 * shards.largest_layer(config, ranks=1)
    half = lambda size: machine.link.half(size, ranks=devices)
    timelines = [_beside_gathers(model, machine, block, half)]
    bare = half(tables * size)
    if trains:
        timelines.append(_beside_gathers(model, machine, block, half, gradients=True))
        bare = 2 * bare + half(tables * FLOAT32)
        alone = parameters * STATE
        split = largest * (size + FLOAT32)
    else:
        alone = parameters * size
        split = largest * size + parameters * size / devices
    ends = work(machine, model.ends(block), times=3 if trains else 1).seconds
    possible = []
    if alone <= machine.memory:
        computed = sum(one.compute for one in timelines)
        possible.append(Pass(computed + ends, 0.0, 0.0, Program(Form.DATA_PARALLEL)))
    if split <= machine.memory:
        possible.append(pass_of(timelines, ends=ends, bare=bare, program=Program(Form.FSDP)))
    return possible


def _beside_gathers(
    model: Model, machine: Machine, block: Block, half: Callable[[float], float], *, gradients: bool = False
) -> Timeline:
    """Each layer beside the next one's gather. gradients: backward, from the last layer, whose gradients are scattered
    beside that too."""
    layers = _layers(model, machine, block, times=2 if gradients else 1)
    if gradients:
        layers.reverse()
    gathers = [half(matrices * model.element_bytes) for _, matrices in layers]
    scatters = [half(matrices * FLOAT32) if gradients else 0.0 for _, matrices in layers]
    both = [gather + scatter for gather, scatter in zip(gathers[1:], scatters)]
    transfers = [gathers[0], *both, 0.0, scatters[-1]]
    works = [Work(), *(layer for layer, _ in layers), Work()]
    slots = (Slot(work, [("weights", seconds)]) for work, seconds in zip(works, transfers, strict=True))
    return play_slots(slots, contention=machine.contention)


def _layers(model: Model, machine: Machine, block: Block, *, times: int) -> list[tuple[Work, int]]:
    """Each layer's work, and its matrices' elements."""
    found = []
    for count, config in shards.kinds(model.config):
        kind = dataclasses.replace(model, config=config)
        kernels = (*kind.step((ATTENTION,), block), *kind.step((MLP,), block))
        found += count * [(work(machine, kernels, times=times), kind.shard.attention + kind.shard.mlp)]
    return found
