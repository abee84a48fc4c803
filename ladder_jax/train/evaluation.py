"""The held-out loss of a run, on the same few batches every time."""

from typing import Any

import jax
import numpy as np

from ladder_jax.config import TrainConfig
from ladder_jax.data.batch import Batch
from ladder_jax.nn import Params
from ladder_jax.parallel import Compiled
from ladder_jax.retrain import Fixed, Plan
from ladder_jax.train.goodput import Account
from ladder_jax.train.gradients import planned_loss
from ladder_jax.train.signals import Asked


class Evaluation:
    """`evaluation(params, fixed)`, of what trains and what is fixed, is the mean loss in nats a token.

    None if a signal asked for the end meanwhile.
    """

    def __init__(
        self,
        plan: Plan,
        batches: list[np.ndarray | Batch],
        *,
        config: TrainConfig,
        account: Account,
        asked: Asked,
    ):
        self._batches, self._account, self._asked = batches, account, asked
        self._sharding = plan.definition.layout.sharding("BT")
        self._loss: Compiled = planned_loss(plan, loop=config.loop)
        self._compiled: jax.stages.Compiled | None = None

    def __call__(self, params: Params, fixed: Fixed) -> float | None:
        if self._compiled is None:
            with self._account.time("compile"):
                shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._sharding)
                self._compiled = self._loss.compile(params, fixed, jax.tree.map(shape, self._batches[0]))
        losses, weights = [], []
        with self._account.time("evaluation"):
            for batch in self._batches:
                if self._asked.now:
                    return None
                losses.append(float(self._compiled(params, fixed, self._on_devices(batch))))
                weights.append(batch.predicted.sum() if isinstance(batch, Batch) else 1)  # padding is not predicted
        return float(np.average(losses, weights=weights))

    def _on_devices(self, batch: Any) -> Any:
        """The whole batch, which every process has; each places its own part."""
        if jax.process_count() == 1:
            return jax.device_put(batch, self._sharding)
        place = lambda a: jax.make_array_from_callback(a.shape, self._sharding, lambda part: a[part])
        return jax.tree.map(place, batch)
