"""What an earlier call left in a store's folder, and whether this one may go on with it."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator, Sequence

from ladder_jax.data.store import manifest as manifests
from ladder_jax.data.store.manifest import JOURNAL, MANIFEST, SETTINGS, Manifest, Shard
from ladder_jax.data.store.shard import PARTS
from ladder_jax.data.store.sources import Part
from ladder_jax.errors import UserError

LOCK = ".lock"


@contextlib.contextmanager
def locked(out: pathlib.Path) -> Iterator[None]:
    """For one process at a time; the system frees it when that ends, however it ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError:
        raise UserError(f"another `ladder-jax tokenize` is at work in {str(out)!r}") from None
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written to: {error.strerror or error}") from None


def check_folder(out: pathlib.Path) -> None:
    ours = (MANIFEST, JOURNAL, PARTS, LOCK)
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not any((out / name).exists() for name in ours))):
        raise UserError(f"--out {out}: something else is there; name a new folder")


def journal(out: pathlib.Path, wanted: Manifest) -> Sequence[Shard]:
    if not (out / JOURNAL).exists():
        manifests.write(wanted, out / JOURNAL)
    found = manifests.read(out / JOURNAL)
    _check_settings(out, found, wanted)
    return found.shards


def _check_settings(out: pathlib.Path, found: Manifest, wanted: Manifest) -> None:
    for name in SETTINGS:
        if getattr(found, name) != getattr(wanted, name):
            raise UserError(
                f"{str(out)!r} was begun with {name.replace('_', ' ')} {getattr(found, name)!r},"
                f" not {getattr(wanted, name)!r}: change it back, or name another --out"
            )


def still_valid(shards: Sequence[Shard], plan: Sequence[Part]) -> list[Shard]:
    """The shards before the first whose sources have changed, or whose place among them has."""
    kept, position = [], 0
    for shard in shards:
        end = position + len(shard.parts)
        if shard.parts != tuple(part.digest for part in plan[position:end]):
            break
        kept.append(shard)
        position = end
    return kept


def compare(out: pathlib.Path, wanted: Manifest, plan: Sequence[Part]) -> Manifest:
    found = manifests.read(out / MANIFEST)
    _check_settings(out, found, wanted)
    if [digest for shard in found.shards for digest in shard.parts] != [part.digest for part in plan]:
        raise UserError(
            f"{str(out)!r} holds a finished store of other sources, or they have changed: name another --out"
        )
    return found
