"""Join parts to a shard."""

import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from ladder_jax.data.store import blocks
from ladder_jax.data.store.manifest import Shard
from ladder_jax.data.store.part import Done
from ladder_jax.data.store.sources import Part

PARTS = "parts"
"""Of a store's folder: where parts wait for their shard."""
BLOCK = 2**24


def join(
    group: Sequence[Part],
    counts: Sequence[Done],
    *,
    folder_of: Callable[[Part], pathlib.Path],
    index: int,
    out: pathlib.Path,
) -> Shard:
    """Shard `index` of those parts. Its files are on the disk when this returns."""
    name, digest = f"{index:05d}", hashlib.sha256()
    with (out / f"{name}.tokens").open("wb") as tokens:
        for part in group:
            with (folder_of(part) / f"{part.digest}.tokens").open("rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
                    tokens.write(block)
        tokens.flush()
        os.fsync(tokens.fileno())
    begins, first = [], 0
    for part, done in zip(group, counts):
        offsets = np.fromfile(folder_of(part) / f"{part.digest}.offsets", "<u8")
        begins.append(offsets[:-1] + np.uint64(first))
        first += done.tokens
    content = np.concatenate([*begins, np.array([first], "<u8")]).astype("<u8").tobytes()
    digest.update(content)
    _write_synced(out / f"{name}.offsets", content)
    checked = b"".join(blocks.digests(out / f"{name}.{kind}") for kind in ("tokens", "offsets"))
    _write_synced(out / f"{name}.digests", checked)
    total = lambda what: sum(getattr(done, what) for done in counts)
    digests = tuple(part.digest for part in group)
    counted = first, total("documents"), digest.hexdigest(), digests, total("empty"), total("skipped")
    return Shard(name, *counted, digests=hashlib.sha256(checked).hexdigest())


def _write_synced(path: pathlib.Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
