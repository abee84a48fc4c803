"""Batches onto the devices: what this process reads of each, and how it is laid out."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ladder_jax.config import TrainConfig
from ladder_jax.data.batches import Batches
from ladder_jax.data.dataset import Dataset


class Feed:
    """`feed[step]`: a global array [B, T + 1] (or a Batch of them), of which this process has read its share alone.

    Reading and placing are apart, as one can go on while the devices compute. The first step is 0.
    """

    def __init__(self, dataset: Dataset, *, config: TrainConfig, sharding: NamedSharding):
        self._shape, self._sharding = (config.batch, config.sequence + 1), sharding
        held = sharding.addressable_devices_indices_map(self._shape).values()
        self._share = sorted({row for rows, _ in held for row in range(*rows.indices(config.batch))})
        self._batches = Batches(dataset.training, config.batch, self._share)

    def abstract(self) -> Any:
        """Shapes and shardings, to compile for."""
        place = lambda a: jax.ShapeDtypeStruct(self._shape, a.dtype, sharding=self._sharding)
        return jax.tree.map(place, self._batches[0])

    def __getitem__(self, step: int) -> Any:
        """Raises UserError where the data cannot be read."""
        return self.place(self.read(step))

    def read(self, step: int) -> Any:
        """This process's rows, on the host. Raises UserError where the data cannot be read."""
        return self._batches[int(step)]

    def place(self, share: Any) -> Any:
        """The global arrays of which `read` gave this process's rows."""
        return jax.tree.map(self._place, share)

    def _place(self, local: np.ndarray) -> jax.Array:
        if self._sharding.is_fully_addressable:
            return jax.device_put(local, self._sharding)

        def shard(index):
            rows, columns = index
            begin = self._share.index(rows.indices(self._shape[0])[0])
            return local[begin : begin + len(range(*rows.indices(self._shape[0]))), columns]

        return jax.make_array_from_callback(self._shape, self._sharding, shard)
