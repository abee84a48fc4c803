"""A run's training step as `ladder_jax.train.run` builds it, with weights and batches of one's
own.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ladder_jax import nn, train
from ladder_jax.checkpoint import Store
from ladder_jax.config import START, ModelConfig, RunConfig
from ladder_jax.data.packing import Batch
from ladder_jax.data.tokenizer import Bytes
from ladder_jax.nn import ModelDef
from ladder_jax.parallel import make_mesh
from ladder_jax.pretrained import open_model
from ladder_jax.processes.agreement import Agreement
from ladder_jax.retrain import ADAPTERS
from ladder_jax.retrain.sources import Sources
from ladder_jax.retrain.task import of_sources
from ladder_jax.train import checkpoints
from ladder_jax.train.folder import CHECKPOINTS, RunContext
from ladder_jax.train.timing import TimeAccount
from tests import cases

BETA1 = 0.5  # by which a first moment is exactly half a gradient


@dataclasses.dataclass(frozen=True)
class Program:
    """config: resolved. teacher: its model. seed: of the weights."""

    config: RunConfig
    teacher: ModelConfig | None
    seed: int

    @functools.cached_property
    def definition(self) -> ModelDef:
        mesh = make_mesh(**self.config.mesh.axes)
        return nn.define(self.config.model, mesh=mesh, experts=self.config.mesh.experts)

    @functools.cached_property
    def task(self) -> Any:
        if not self.config.retrains:
            return train.Pretraining(self.definition)
        return of_sources(
            self.config, definition=self.definition, teacher=self.teacher, sources=Sources()
        )

    @functools.cached_property
    def step(self):
        return train.train_step(self.definition, config=self.config.train, task=self.task)

    # The weights, as NumPy arrays by stored names.

    @functools.cached_property
    def start(self):
        """Of the model that training starts from."""
        return cases.parameters(self.definition, seed=self.seed)

    @functools.cached_property
    def of_teacher(self):
        """None without a teacher."""
        if self.teacher is None or self.config.distill.teacher == START:
            return self.teacher and self.start
        return cases.parameters(ModelDef(self.teacher, self.definition.layout), seed=self.seed + 1)

    @functools.cached_property
    def trained(self):
        """What trains, some steps after the start: low-rank factors do something, a taught model
        has moved.
        """
        if ADAPTERS in self.task.abstract:
            return factors(self.task, self.definition, seed=self.seed + 2)
        if not self.config.retrains:
            return self.start
        moved = cases.parameters(self.definition, seed=self.seed + 2)
        return jax.tree.map(np.asarray, self.task.split(moved)[0])

    @functools.cached_property
    def student(self):
        """All the model's weights, with factors beside them where `tests.reference` reads them."""
        whole = dict(self.start)
        below = self.config.train.freeze
        for name, part in self.trained.items():
            if name == ADAPTERS:
                full = jax.tree.map(
                    lambda a: np.concatenate([np.zeros((below, *a.shape[1:]), a.dtype), a]), part
                )
                groups = {
                    group: {**whole["layers"][group], "adapters": pairs}
                    for group, pairs in full.items()
                }
                whole["layers"] = {**whole["layers"], **groups}
            elif name == "layers":
                join = lambda a, b: np.concatenate([a[:below], b])
                whole["layers"] = jax.tree.map(join, whole["layers"], part)
            else:
                whole[name] = part
        return whole

    def of_trained(self, gradients):
        """Of the gradients of `student` those of what trains, in the task's form."""
        tail = lambda tree: jax.tree.map(lambda a: a[self.config.train.freeze :], tree)
        if ADAPTERS in self.trained:
            groups = self.trained[ADAPTERS]
            return {
                ADAPTERS: tail({group: gradients["layers"][group]["adapters"] for group in groups})
            }
        return {
            name: tail(gradients[name]) if name == "layers" else gradients[name]
            for name in self.trained
        }

    # The step.

    def begin(self, *, step: int = 0):
        """The state after so many steps, the optimizer's a new one, and the frozen parameters."""
        frozen = {}
        if self.config.retrains:
            teacher = self.of_teacher and cases.place(self.of_teacher, self.definition)
            frozen = self.task.split(cases.place(self.start, self.definition), teacher=teacher)[1]
        put = lambda a, like: jax.device_put(jnp.array(a), like.sharding)
        params = jax.tree.map(put, self.trained, self.task.abstract)
        settings = dict(config=self.config.train, params=params, task=self.task)
        state = train.initial_state(self.definition, **settings)
        return dataclasses.replace(
            state, step=jax.device_put(np.int32(step), state.step.sharding)
        ), frozen

    def put(self, batch):
        return jax.device_put(batch, self.definition.layout.sharding("BT"))

    def advance(self, state, frozen, batch):
        """The state after a step, its loss, and its gradients of what trains."""
        state, metrics = self.step(state, self.put(batch), frozen)
        first_moment = checkpoints.optimizer_to_dict(state.optimizer)["mu"]
        gradients = jax.tree.map(lambda a: np.asarray(a) / (1 - BETA1), first_moment)
        return state, float(metrics["loss"]), gradients

    def resume(self, state, frozen, folder: pathlib.Path):
        """The state and the frozen parameters, written and read as a run does."""
        task = self.task
        if self.config.retrains:
            sources = Sources(*self._written(folder))
            task = dataclasses.replace(task, sources=sources)
        context = RunContext(
            config=self.config,
            tokenizer=Bytes(),
            folder=folder,
            agreement=Agreement("run"),
            account=TimeAccount(),
            stop=None,
            say=lambda line: None,
            heartbeat=lambda doing: None,
        )
        store = Store(folder / CHECKPOINTS, config=self.config)
        checkpoints.save(store, state, frozen, context=context, task=task)
        store.close()
        assert store.failure() is None
        return lambda: checkpoints.restore(checkpoints.newest(context), context=context, task=task)

    def _written(self, folder: pathlib.Path):
        """Checkpoints of the start and of the teacher, opened."""
        yield self._model(folder / "start", self.config.model, self.start)
        if self.teacher is not None:
            of_start = self.config.distill.teacher == START
            name, model = ("start", self.config.model) if of_start else ("teacher", self.teacher)
            yield self._model(folder / name, model, self.of_teacher)

    def _model(self, folder: pathlib.Path, model: ModelConfig, params):
        if not folder.exists():
            plain = RunConfig(
                model,
                self.config.mesh,
                dataclasses.replace(self.config.train, start=None, freeze=0),
            )
            store = Store(folder / CHECKPOINTS, config=plain)
            definition = ModelDef(model, self.definition.layout)
            store.save(1, params=cases.place(params, definition), optimizer={"count": np.zeros(())})
            store.close()
            if failure := store.failure():
                raise OSError(str(failure))
        return open_model(folder)


def factors(task, definition: ModelDef, *, seed: int):
    """Low-rank factors; of the experts that are padding, zeros."""
    rng, moe = np.random.default_rng(seed), definition.config.moe

    def value(leaf, dims):
        kind = dims.removeprefix("L")
        padded = leaf.shape[1]
        real = moe.experts if kind.startswith("E") else padded
        values = 0.3 * rng.standard_normal((leaf.shape[0], real, *leaf.shape[2:]))
        rest = ((0, 0),) * (leaf.ndim - 2)
        return np.pad(values, ((0, 0), (0, padded - real), *rest)).astype(np.float32)

    return jax.tree.map(value, task.abstract, task.trained_dims)


def batch_of(kind: str, *, rows: int, length: int, vocab: int, seed: int):
    """(tokens, segments, loss mask), each [rows, length + 1]; of plain tokens the others are
    ones.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length + 1)).astype(np.int32)
    segments = np.ones_like(tokens)
    mask = np.ones_like(tokens)
    if kind == "plain":
        return tokens, segments, mask
    for row in segments:
        filled = int(rng.integers(0, length + 2))  # perhaps none, perhaps all
        cuts = np.sort(rng.integers(0, filled + 1, rng.integers(0, 3)))
        row[:] = 1 + (np.arange(length + 1)[:, None] >= cuts).sum(1)
        row[filled:] = 0
    if kind == "masked":
        mask = rng.integers(0, 2, tokens.shape).astype(np.int32)
    return tokens, segments, mask


def placed(kind: str, tokens, segments, mask) -> Any:
    if kind == "plain":
        return tokens
    return Batch(tokens, segments, mask if kind == "masked" else None)
