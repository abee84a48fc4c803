"""Batches are read while the devices compute."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grain

BATCHES = 2  # read ahead


@contextlib.contextmanager
def read_ahead(read: Callable[[int], Any], *, first: int, last: int) -> Iterator[Iterator[Any]]:
    """`read(first)` to `read(last - 1)`, by a thread of their own; what goes wrong there is raised here."""
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=BATCHES)
    batches = iter(grain.MapDataset.range(first, last).map(read).to_iter_dataset(options))
    try:
        yield batches
    finally:
        batches.close()
