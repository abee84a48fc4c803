"""The held-out loss of a run, on the same few batches every time."""

import jax
import numpy as np

from ladder_jax.config import TrainConfig
from ladder_jax.nn import Definition, Params
from ladder_jax.parallel import Compiled
from ladder_jax.train.ahead import on_devices
from ladder_jax.train.goodput import Account
from ladder_jax.train.signals import Asked
from ladder_jax.train.step import mean_loss


class Evaluation:
    """`evaluation(params)` is the mean loss in nats a token; None if a signal asked for the end meanwhile."""

    def __init__(
        self, definition: Definition, batches: list[np.ndarray], *, config: TrainConfig, account: Account, asked: Asked
    ):
        self._batches, self._account, self._asked = batches, account, asked
        self._sharding = definition.layout.sharding("BT")
        self._loss: Compiled = mean_loss(definition, loop=config.loop)
        self._compiled: jax.stages.Compiled | None = None

    def __call__(self, params: Params) -> float | None:
        if self._compiled is None:
            with self._account.time("compile"):
                example = jax.ShapeDtypeStruct(self._batches[0].shape, np.int32, sharding=self._sharding)
                self._compiled = self._loss.compile(params, example)
        losses = []
        with self._account.time("evaluation"):
            for batch in self._batches:
                if self._asked.now:
                    return None
                losses.append(float(self._compiled(params, on_devices(batch, self._sharding))))
        return float(np.mean(losses))
