"""Resuming: which files in a store's folder are from an earlier call, and whether this call may use them."""

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
"""Files that a kill can leave behind before the journal is written."""
_SHARD = re.compile(r"[0-9]{5,}\.(tokens|offsets|digests)")
_PORTIONS_OWN = {LOCK, JOURNAL, FINISHED} | {manifests.partial(pathlib.Path(name)).name for name in (JOURNAL, FINISHED)}
_PART = re.compile(r"[0-9a-f]{20}\.(json|tokens|offsets)(\.partial)?")


@contextlib.contextmanager
def locked(out: pathlib.Path) -> Iterator[None]:
    """Hold the folder's lock. The system releases it when the process ends, also by a kill.

    Raises UserError where another process holds it, or the folder cannot be written to.
    """
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
    """Raises UserError unless `out` is new, empty, a store or a folder of portions; or if a source lies in it.

    A folder is a store only if it holds a manifest or a journal that can be read. All other files, `parts/` and `.lock`
    included, may be the user's.
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
    """Whether it is empty, or a call was killed in it before it wrote a journal."""
    files = {path.name: path for path in out.iterdir()}
    if not files:
        return True
    plain = all(path.is_file() and not path.is_symlink() for path in files.values())
    return files.keys() <= _BEGUN and plain and LOCK in files and files[LOCK].stat().st_size == 0


def _is_portions(out: pathlib.Path) -> bool:
    """Whether it holds folders of portions, and nothing else."""
    paths = [path for path in out.iterdir() if path.name not in _BEGUN]
    is_folder = lambda path: PORTION.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    return all(is_folder(path) and (_is_begun(path) or _is_store(path)) for path in paths)


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
    """Remove the journal, the parts, the portions, and shards that are not in `shards`, whose sources have changed.
    Files with other names stay, and so do folders that hold such files."""
    names = {shard.name for shard in shards}
    for path in list(out.iterdir()):
        if _SHARD.fullmatch(path.name) and path.stem not in names:
            path.unlink()
        elif (path.name == PARTS or PORTION.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
            remove_parts(path, keep=())
            _remove_folder(path)
    (out / JOURNAL).unlink(missing_ok=True)  # last: after a kill it says that this is still to be done


def remove_parts(folder: pathlib.Path, *, keep: Sequence[Part]) -> None:
    """Remove the files of all parts except `keep`."""
    kept = {part.digest for part in keep}
    for file in folder.iterdir():
        if _PART.fullmatch(file.name) and file.name.partition(".")[0] not in kept:
            file.unlink()


def _remove_folder(folder: pathlib.Path) -> None:
    """Remove a folder that holds only the files of a portion."""
    if {file.name for file in folder.iterdir()} <= _PORTIONS_OWN:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def journal(out: pathlib.Path, settings: Manifest) -> Sequence[Shard]:
    """The finished shards; a new journal has none. Raises UserError for a journal of other settings."""
    if not (out / JOURNAL).exists():
        manifests.write(settings, out / JOURNAL)
    earlier = manifests.read(out / JOURNAL)
    check_settings(out, earlier, settings)
    return earlier.shards


def check_settings(out: pathlib.Path, earlier: Manifest, settings: Manifest) -> None:
    """Raises UserError where tokenizer, field or shard_tokens of an earlier call were others."""
    for name in SETTINGS:
        if getattr(earlier, name) != getattr(settings, name):
            raise UserError(
                f"{str(out)!r} was begun with {name.replace('_', ' ')} {getattr(earlier, name)!r},"
                f" not {getattr(settings, name)!r}: change it back, or name another --out"
            )


def still_valid(shards: Sequence[Shard], plan: Sequence[Part]) -> list[Shard]:
    """The shards before the first whose sources have changed or stand elsewhere in the plan."""
    kept, position = [], 0
    for shard in shards:
        end = position + len(shard.parts)
        if shard.parts != tuple(part.digest for part in plan[position:end]):
            break
        kept.append(shard)
        position = end
    return kept


def compare(out: pathlib.Path, settings: Manifest, plan: Sequence[Part]) -> Manifest:
    """The manifest of a finished store. Raises UserError where it is of other sources or settings."""
    finished = manifests.read(out / MANIFEST)
    check_settings(out, finished, settings)
    if [digest for shard in finished.shards for digest in shard.parts] != [part.digest for part in plan]:
        raise UserError(
            f"{str(out)!r} holds a finished store of other sources, or they have changed: name another --out"
        )
    return finished
