"""What an earlier call left in a store's folder, and whether this one may go on with it."""

import contextlib
import fcntl
import functools
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from ladder_jax.data.store import manifest as manifests
from ladder_jax.data.store.manifest import JOURNAL, MANIFEST, SETTINGS, Manifest, Shard
from ladder_jax.data.store.shard import PARTS
from ladder_jax.data.store.sources import Part
from ladder_jax.errors import UserError

LOCK = ".lock"
_BEGUN = {LOCK, manifests.partial(pathlib.Path(JOURNAL)).name}
"""What a kill can leave before there is a journal."""
_SHARD = re.compile(r"[0-9]{5,}\.(tokens|offsets)")
_PART = re.compile(r"[0-9a-f]{20}\.(json|tokens|offsets)(\.partial)?")


@contextlib.contextmanager
def locked(out: pathlib.Path) -> Iterator[None]:
    """For one process at a time; the system frees it when that ends, however it ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(handle)
    except BlockingIOError:
        raise UserError(f"another `ladder-jax tokenize` is at work in {str(out)!r}") from None
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written to: {error.strerror or error}") from None


def check_folder(out: pathlib.Path, plan: Sequence[Part]) -> None:
    """Raises UserError where `out` is anything but new, empty or a store's, or holds one of the sources.

    A store's folder is one with a manifest or a journal that can be read: whatever else lies in a folder, `parts/` and
    `.lock` too, may be the user's.
    """
    if not os.path.lexists(out):
        return
    if not out.is_dir() or not (_is_begun(out) or _is_store(out)) or (out / PARTS).is_symlink():
        raise UserError(f"--out {out}: something else is there; name a new folder")
    inside, resolved = out.resolve(), functools.cache(pathlib.Path.resolve)
    for file in (pathlib.Path(file.path) for part in plan for file in part.files):
        real = file.resolve() if file.is_symlink() else resolved(file.parent)
        if real.is_relative_to(inside):
            raise UserError(f"the source {str(file)!r} lies in --out {out}: name a new folder")


def _is_begun(out: pathlib.Path) -> bool:
    """Empty, or left by a kill before anything was in it."""
    found = {path.name: path for path in out.iterdir()}
    if not found:
        return True
    plain = all(path.is_file() and not path.is_symlink() for path in found.values())
    return found.keys() <= _BEGUN and plain and LOCK in found and found[LOCK].stat().st_size == 0


def _is_store(out: pathlib.Path) -> bool:
    files = [out / name for name in (MANIFEST, JOURNAL) if os.path.lexists(out / name)]
    for file in files:
        if not file.is_file():
            return False
        try:
            manifests.read(file)
        except UserError as error:
            raise UserError(f"--out {out}: something else is there, or a damaged store ({error})") from None
    return bool(files)


def tidy(out: pathlib.Path, shards: Sequence[Shard]) -> None:
    """Remove the journal, the parts, and shards of sources that have changed since; a name that is none of ours stays,
    and so does a folder that holds one."""
    (out / JOURNAL).unlink(missing_ok=True)
    for file in (out / PARTS).iterdir():
        if _PART.fullmatch(file.name):
            file.unlink()
    if not any((out / PARTS).iterdir()):
        (out / PARTS).rmdir()
    names = {shard.name for shard in shards}
    for file in out.iterdir():
        if _SHARD.fullmatch(file.name) and file.stem not in names:
            file.unlink()


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
