"""Batches onto the devices: read ahead by a thread while the devices compute, each process its own rows."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from ladder_jax.config import TrainConfig
from ladder_jax.data.batches import Batches
from ladder_jax.data.dataset import Dataset

READ_AHEAD = 2  # batches


class DataLoader:
    """`loader[step]`: a global array [B, T + 1] (or a Batch of them), of which this process reads its rows alone.

    Reading and placing are separate methods, so that a thread can read while the devices compute. The first step is 0.
    """

    def __init__(self, dataset: Dataset, *, config: TrainConfig, sharding: NamedSharding):
        self._shape, self._sharding = (config.batch, config.sequence + 1), sharding
        indices = sharding.addressable_devices_indices_map(self._shape).values()
        self._rows = sorted({row for rows, _ in indices for row in range(*rows.indices(config.batch))})
        self._batches = Batches(dataset.training, config.batch, self._rows)

    def abstract(self) -> Any:
        """Shapes and shardings of a batch, to compile for."""
        shape = lambda a: jax.ShapeDtypeStruct(self._shape, a.dtype, sharding=self._sharding)
        return jax.tree.map(shape, self._batches[0])

    def __getitem__(self, step: int) -> Any:
        """Raises UserError where the data cannot be read."""
        return self.place(self.read(step))

    def read(self, step: int) -> Any:
        """This process's rows, on the host. Raises UserError where the data cannot be read."""
        return self._batches[int(step)]

    def place(self, rows: Any) -> Any:
        """The global arrays of which `read` gave this process's rows."""
        return jax.tree.map(self._place, rows)

    def _place(self, local: np.ndarray) -> jax.Array:
        if self._sharding.is_fully_addressable:
            return jax.device_put(local, self._sharding)

        def shard(index):
            rows, columns = index
            begin = self._rows.index(rows.indices(self._shape[0])[0])
            return local[begin : begin + len(range(*rows.indices(self._shape[0]))), columns]

        return jax.make_array_from_callback(self._shape, self._sharding, shard)


@contextlib.contextmanager
def read_ahead(read: Callable[[int], Any], *, first: int, last: int) -> Iterator[Iterator[Any]]:
    """Gives an iterator of `read(first)` to `read(last - 1)`, called in a thread; it raises the thread's errors."""
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD)
    batches = iter(grain.MapDataset.range(first, last).map(read).to_iter_dataset(options))
    try:
        yield batches
    finally:
        batches.close()
