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

from ladder_jax.config import ModelConfig, Phase
from ladder_jax.predict import work
from ladder_jax.predict.implementation import Implementation
from ladder_jax.predict.layers import work_of
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.model import Pass
from ladder_jax.predict.program import Form, Program
from ladder_jax.predict.timeline import Work, beside
from ladder_jax.predict.work import ATTENTION, MLP, Block, Kernel, Model
from ladder_jax.schedule import shards

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
    step = _Step(model, machine, block, devices=devices, trains=trains)
    possible = []
    if _parameters(model) * (STATE if trains else model.element_bytes) <= machine.memory:
        possible.append(Pass(step.compute, 0.0, 0.0, program=Program(Form.DATA_PARALLEL)))
    if _gathered(model, devices=devices, trains=trains) <= machine.memory:
        possible.append(step.fsdp())
    return possible


@dataclasses.dataclass(frozen=True)
class _Step:
    """One device's step over its own rows."""

    model: Model
    machine: Machine
    block: Block
    devices: int
    trains: bool

    @property
    def compute(self) -> float:
        layers = self._layers(1) + (self._layers(2) if self.trains else [])
        return sum(layer.seconds for layer, _ in layers) + self._ends()

    def fsdp(self) -> Pass:
        half = lambda size: self.machine.link.half(size, ranks=self.devices)
        tables, size, layers = _tables(self.model), self.model.element_bytes, self._layers(1)
        bare, gathers = half(tables * size), [half(matrices * size) for _, matrices in layers]
        seconds, wire = self._beside(layers, gathers), sum(gathers)
        if self.trains:
            scatters = [half(matrices * FLOAT32) for _, matrices in layers]
            # Backward the last layer comes first; its gradients are scattered beside the next one's gather.
            both = [gather + scatter for gather, scatter in zip(gathers, scatters[1:])]
            seconds += self._beside(self._layers(2)[::-1], [*both, gathers[-1]][::-1]) + scatters[0]
            wire += sum(gathers) + sum(scatters)
            bare = 2 * bare + half(tables * FLOAT32)
        seconds += self._ends() + bare
        return Pass(seconds, wire + bare, seconds - self.compute, program=Program(Form.FSDP))

    def _beside(self, layers: list[tuple[Work, int]], transfers: list[float]) -> float:
        """Seconds of all layers: after a bare transfer each has the next one's beside it."""
        seconds = transfers[0] + layers[-1][0].seconds
        for (layer, _), wire in zip(layers, transfers[1:]):
            seconds += max(wire, beside(layer, wire=wire, contention=self.machine.contention))
        return seconds

    def _layers(self, times: int) -> list[tuple[Work, int]]:
        """Each layer's work, and its matrices' elements."""
        found = []
        for count, config in shards.kinds(self.model.config):
            kind = dataclasses.replace(self.model, config=config)
            step = lambda sublayer, kind=kind: kind.step((sublayer,), self.block, shared_norm=False)
            layer = self._work((*step(ATTENTION), *step(MLP)), times)
            found += count * [(layer, kind.shard.attention + kind.shard.mlp)]
        return found

    def _ends(self) -> float:
        kernels = (self.model.embedding(self.block), *self.model.head(self.block))
        return self._work(kernels, 3 if self.trains else 1).seconds

    def _work(self, kernels: tuple[Kernel, ...], times: int) -> Work:
        return work_of(kernels, self.machine, self.model.implementation, times=times)


def _tables(model: Model) -> int:
    return (1 if model.config.tie_embeddings else 2) * model.shard.vocabulary * model.config.d_model


def _parameters(model: Model) -> int:
    return shards.layers(model.config, ranks=1) + _tables(model)


def _gathered(model: Model, *, devices: int, trains: bool) -> float:
    """Bytes of two gathered layers, and of what a device keeps between them."""
    layers = 2 * shards.largest_layer(model.config, ranks=1)
    if trains:
        return layers * (model.element_bytes + FLOAT32)
    return layers * model.element_bytes + _parameters(model) * model.element_bytes / devices
