"""Batches of rows, on grain, and their way onto the devices.

A batch is a function of the seed and the step alone, so an iteration has no state to save.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from ladder_jax.config import TrainConfig
from ladder_jax.data.batch import Batch
from ladder_jax.data.packing import pack

READ_AHEAD = 2  # batches


@dataclasses.dataclass(frozen=True)
class Windows:
    """A grain data source: window i is tokens [i * T, i * T + T], T + 1 of them (the last is only a
    target).
    """

    tokens: np.ndarray
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index) -> np.ndarray:
        start = int(index) * self.length
        return self.tokens[start : start + self.length + 1].astype(np.int32)


class PackedRows:
    """A grain data source: documents packed into rows of T + 1 tokens, one row's Batch each.

    read: gives the tokens [count] from `start` on. starts: int64 [documents + 1], the documents'
    first tokens, and the end. length: T. loss_mask: of all tokens, if there is one.
    """

    def __init__(
        self,
        read: Callable[[int, int], np.ndarray],
        starts: np.ndarray,
        *,
        length: int,
        loss_mask: np.ndarray | None,
    ):
        self._read, self._size, self._loss_mask = read, length + 1, loss_mask
        self._rows = pack(starts[:-1], np.diff(starts), row=self._size)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index) -> Batch:
        """Raises UserError where the tokens cannot be read."""
        rows, at = self._rows, 0
        tokens, segments, loss_mask = np.zeros((3, self._size), np.int32)
        first, end = rows.first[int(index) : int(index) + 2]
        for segment, piece in enumerate(range(first, end), start=1):
            start = int(rows.start[piece])
            length = int(rows.length[piece])
            here = slice(at, at := at + length)
            tokens[here] = self._read(start, length)
            segments[here] = segment
            if self._loss_mask is not None:
                loss_mask[here] = self._loss_mask[start : start + length]
        return Batch(tokens, segments, None if self._loss_mask is None else loss_mask)


@dataclasses.dataclass(frozen=True)
class Batches:
    """`batches[step]`: the rows of that step, stacked, [B, ...].

    rows: without end. share: which rows of each batch are wanted here; None for all. Others are
        never read.
    """

    rows: grain.MapDataset
    batch: int
    share: Sequence[int] | None = None

    def __getitem__(self, step: int) -> np.ndarray | Batch:
        share = range(self.batch) if self.share is None else self.share
        found = [self.rows[step * self.batch + index] for index in share]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *found)


class Epochs:
    """A grain data source without end: every row once an epoch, every epoch in an order of its
    own.
    """

    def __init__(self, rows: Windows | PackedRows, *, seed: int):
        self._rows, self._seed = rows, seed

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index) -> np.ndarray | Batch:
        epoch, place = divmod(int(index), len(self._rows))
        return self._rows[_order(len(self._rows), self._seed, epoch)[place]]


@functools.lru_cache(maxsize=1024)
def _order(count: int, seed: int, epoch: int) -> grain.MapDataset:
    """The indices of one epoch's rows. Hashed: grain's own repetition adds the epoch, so that epoch
    1 of a seed is epoch 0 of the next.
    """
    if epoch:
        seed = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    return grain.MapDataset.range(count).shuffle(seed)


def shuffled(rows: Windows | PackedRows, *, seed: int) -> grain.MapDataset:
    """Every row once an epoch, every epoch in another order, without end."""
    return grain.MapDataset.source(Epochs(rows, seed=seed))


def evaluated(
    rows: grain.MapDataset, count: int, *, config: TrainConfig
) -> list[np.ndarray | Batch]:
    """The batches of held-out `rows`, of which there are `count` before they repeat, that are
    evaluated.
    """
    found = Batches(rows, config.batch)
    wanted = min(config.evaluation_batches, count // config.batch)
    return [found[index] for index in range(max(1, wanted))]


class DataLoader:
    """`loader[step]`: a global array [B, T + 1] (or a Batch of them), of which this process reads
    its rows alone.

    rows: without end. Reading and placing are separate methods, so that a thread can read while the
    devices compute. The first step is 0.
    """

    def __init__(self, rows: grain.MapDataset, *, config: TrainConfig, sharding: NamedSharding):
        self._shape, self._sharding = (config.batch, config.sequence + 1), sharding
        indices = sharding.addressable_devices_indices_map(self._shape).values()
        self._share = sorted({row for part, _ in indices for row in range(config.batch)[part]})
        self._batches = Batches(rows, config.batch, self._share)

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
            wanted = range(self._shape[0])[rows]
            begin = self._share.index(wanted[0])
            return local[begin : begin + len(wanted), columns]

        return jax.make_array_from_callback(self._shape, self._sharding, shard)


@contextlib.contextmanager
def read_ahead(read: Callable[[int], Any], *, first: int, last: int) -> Iterator[Iterator[Any]]:
    """Gives an iterator of `read(first)` to `read(last - 1)`, called in a thread; it raises the
    thread's errors.
    """
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD)
    batches = iter(grain.MapDataset.range(first, last).map(read).to_iter_dataset(options))
    try:
        yield batches
    finally:
        batches.close()
