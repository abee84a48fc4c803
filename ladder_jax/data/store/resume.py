"""What an earlier call left in a store's folder, and whether this one may go on with it."""

import contextlib
import fcntl
import functools
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from ladder_jax.data.store import manifest as manifests
from ladder_jax.data.store.manifest import FINISHED, JOURNAL, MANIFEST, PORTION, SETTINGS, Manifest, Shard
from ladder_jax.data.store.shard import PARTS
from ladder_jax.data.store.sources import Part
from ladder_jax.errors import UserError

LOCK = ".lock"
_BEGUN = {LOCK, manifests.partial(pathlib.Path(JOURNAL)).name}
"""What a kill can leave before there is a journal."""
_SHARD = re.compile(r"[0-9]{5,}\.(tokens|offsets)")
_PORTIONS_OWN = {LOCK, JOURNAL, FINISHED} | {manifests.partial(pathlib.Path(name)).name for name in (JOURNAL, FINISHED)}
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
    """Raises UserError where `out` is anything but new, empty, a store's or of portions, or holds one of the sources.

    A store's folder is one with a manifest or a journal that can be read: whatever else lies in a folder, `parts/` and
    `.lock` too, may be the user's.
    """
    if not os.path.lexists(out):
        return
    ours = out.is_dir() and (_is_begun(out) or _is_store(out) or _is_portions(out))
    if not ours or (out / PARTS).is_symlink():
        raise UserError(f"--out {out}: something else is there; name a new folder")
    inside, resolved = out.resolve(), functools.cache(pathlib.Path.resolve)
    for file in (pathlib.Path(file.path) for part in plan for file in part.files if not file.on_hub):
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


def _is_portions(out: pathlib.Path) -> bool:
    """Whether it holds folders of portions, and nothing else."""
    found = [path for path in out.iterdir() if path.name not in _BEGUN]
    folder = lambda path: PORTION.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    return all(folder(path) and (_is_begun(path) or _is_store(path)) for path in found)


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
    """Remove the journal, the parts, the portions, and shards of sources that have changed since; a name that is none
    of ours stays, and so does a folder that holds one."""
    (out / JOURNAL).unlink(missing_ok=True)
    names = {shard.name for shard in shards}
    for path in list(out.iterdir()):
        if _SHARD.fullmatch(path.name) and path.stem not in names:
            path.unlink()
        elif (path.name == PARTS or PORTION.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
            remove_parts(path, keep=())
            _remove_folder(path)


def remove_parts(folder: pathlib.Path, *, keep: Sequence[Part]) -> None:
    """The files of parts, but for those of `keep`."""
    kept = {part.digest for part in keep}
    for file in folder.iterdir():
        if _PART.fullmatch(file.name) and file.name.partition(".")[0] not in kept:
            file.unlink()


def _remove_folder(folder: pathlib.Path) -> None:
    """Where it holds nothing but a portion's own files."""
    if {file.name for file in folder.iterdir()} <= _PORTIONS_OWN:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


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
