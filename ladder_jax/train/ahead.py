"""Batches are read while the devices compute, and placed on them."""

import contextlib
from collections.abc import Iterator

import grain
import jax
import numpy as np

BATCHES = 2  # read ahead


@contextlib.contextmanager
def read_ahead(dataset: grain.MapDataset, *, first: int) -> Iterator[Iterator[np.ndarray]]:
    """The batches of the steps after `first`, by a thread of their own; what goes wrong there is raised here."""
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=BATCHES)
    batches = iter(dataset[first:].to_iter_dataset(options))
    try:
        yield batches
    finally:
        batches.close()


def on_devices(batch: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """The whole batch, which every process has, as one array; each process places its own part."""
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    return jax.make_array_from_callback(batch.shape, sharding, lambda part: batch[part])
