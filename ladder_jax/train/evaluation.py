"""The held-out loss of a run, on the same few batches every time."""

import dataclasses
from typing import Any

import jax
import numpy as np

from ladder_jax.data.batch import Batch
from ladder_jax.nn import Params
from ladder_jax.train.folder import RunContext
from ladder_jax.train.gradients import TrainingTask, held_out_loss


@dataclasses.dataclass
class Evaluation:
    """`evaluation(trained, frozen)` is the mean loss in nats a token; None if a signal interrupted it."""

    task: TrainingTask
    batches: list[np.ndarray | Batch]
    context: RunContext
    _compiled: jax.stages.Compiled | None = None

    def __call__(self, trained: Params, frozen: Params) -> float | None:
        if self._compiled is None:
            with self.context.account.time("compile"):
                loss = held_out_loss(self.task, loop=self.context.config.train.loop)
                shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._sharding)
                self._compiled = loss.compile(trained, frozen, jax.tree.map(shape, self.batches[0]))
        losses, weights = [], []
        with self.context.account.time("evaluation"):
            for batch in self.batches:
                if self.context.stop.interrupts:
                    return None
                losses.append(float(self._compiled(trained, frozen, self._on_devices(batch))))
                weights.append(batch.predicted.sum() if isinstance(batch, Batch) else 1)  # padding is not predicted
        return float(np.average(losses, weights=weights))

    @property
    def _sharding(self) -> jax.sharding.NamedSharding:
        return self.task.definition.layout.sharding("BT")

    def _on_devices(self, batch: Any) -> Any:
        """Every process has the whole batch, and places the shards of its own devices."""
        if jax.process_count() == 1:
            return jax.device_put(batch, self._sharding)
        place = lambda a: jax.make_array_from_callback(a.shape, self._sharding, lambda part: a[part])
        return jax.tree.map(place, batch)
