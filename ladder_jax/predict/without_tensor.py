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

from ladder_jax.config import ModelConfig, Phase
from ladder_jax.predict import work
from ladder_jax.predict.implementation import Implementation
from ladder_jax.predict.layers import work_of
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.model import Pass
from ladder_jax.predict.program import Form, Program
from ladder_jax.predict.timeline import Work, beside
from ladder_jax.predict.work import ATTENTION, MLP, Model

FLOAT32, STATE = 4, 16  # bytes an element, and a parameter in training


def passes(
    config: ModelConfig,
    *,
    machine: Machine,
    devices: int,
    rows: int,
    tokens: int,
    phase: Phase,
    implementation: Implementation,
) -> list[Pass]:
    """The step of `rows` x `tokens` tokens by each mesh that has rows to share, and memory for the weights."""
    if devices == 1 or rows % devices:
        return []
    model, trains = Model(config, 1, implementation), phase is Phase.TRAIN
    block = work.prefill(rows=rows // devices, prompt_length=tokens, new_tokens=0, implementation=implementation)
    of = lambda sublayer, times: work_of(
        model.step((sublayer,), block, shared_norm=False), machine, implementation, times=times
    )
    layer = lambda times: Work(
        of(ATTENTION, times).busy + of(MLP, times).busy, of(ATTENTION, times).idle + of(MLP, times).idle
    )
    ends = work_of(
        (model.embedding(block), *model.head(block)), machine, implementation, times=3 if trains else 1
    ).seconds
    compute = ends + config.num_layers * sum(layer(times).seconds for times in ((1, 2) if trains else (1,)))

    found = []
    if _parameters(model) * (STATE if trains else model.element_bytes) <= machine.memory:
        found.append(Pass(compute, 0.0, 0.0, program=Program(Form.DATA_PARALLEL)))
    if _gathered(model, devices=devices, trains=trains) <= machine.memory:
        half = lambda size: machine.link.half(size, ranks=devices)
        shard = model.shard
        matrices, tables = shard.attention + shard.mlp, _tables(model)
        gather, scatter = half(matrices * model.element_bytes), half(matrices * FLOAT32)
        more, contention = config.num_layers - 1, machine.contention
        between = lambda work, wire: max(wire, beside(work, wire=wire, contention=contention))
        seconds = gather + more * between(layer(1), gather) + layer(1).seconds
        wire, bare = config.num_layers * gather, half(tables * model.element_bytes)
        if trains:
            both = gather + scatter
            seconds += gather + more * between(layer(2), both) + layer(2).seconds + scatter
            wire += config.num_layers * both
            bare = 2 * bare + half(tables * FLOAT32)
        seconds += ends + bare
        found.append(Pass(seconds, wire + bare, seconds - compute, program=Program(Form.FSDP)))
    return found


def _tables(model: Model) -> int:
    return (1 if model.config.tie_embeddings else 2) * model.shard.vocabulary * model.config.d_model


def _parameters(model: Model) -> int:
    return model.config.num_layers * (model.shard.attention + model.shard.mlp) + _tables(model)


def _gathered(model: Model, *, devices: int, trains: bool) -> float:
    """Bytes of two gathered layers, and of what a device keeps between them."""
    layers = 2 * (model.shard.attention + model.shard.mlp)
    if trains:
        return layers * (model.element_bytes + FLOAT32)
    return layers * model.element_bytes + _parameters(model) * model.element_bytes / devices
