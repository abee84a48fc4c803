"""A checkpoint's manifest: the size and digest of each of its files, to detect later changes. It is written last.

Orbax stores no checksums of values. Digests are BLAKE2b of 128 bits, computed in threads (hashlib releases the
interpreter's lock) at about 1 GB/s each. In an object store they are the store's own checksums, which it computes from
the content, so that no object is read. A checkpoint that was copied to a disk is compared by its MD5 (gs://) or by
sizes alone (s3://, whose ETag need not be a digest); one that was copied into a store is read to compare it.
"""

import base64
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import stat
from typing import Any

from ladder_jax import remote
from ladder_jax.files import AnyPath, is_remote

NAME = "manifest.json"
DAMAGED = "manifest.damaged.json"  # in an object store: the manifest of a checkpoint that was put aside
DIGEST = "blake2b-128"
THREADS = 16


@dataclasses.dataclass(frozen=True)
class File:
    size: int
    digest: str


def write(folder: AnyPath) -> None:
    """Write the manifest of all files in `folder`. On return, the files and the manifest are synced to the disk."""
    if is_remote(folder):
        entries = {name: _stated(info) for name, info in sorted(remote.listed(folder).items()) if name != NAME}
        (folder / NAME).write_text(_text(entries))
        return
    (folder / NAME).unlink(missing_ok=True)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        entries = dict(zip((str(path.relative_to(folder)) for path in files), pool.map(_digest_synced, files)))
    partial = folder / f"{NAME}.tmp"
    with partial.open("w", encoding="utf-8") as file:
        file.write(_text(entries))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / NAME)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(path)


def problems(folder: AnyPath, *, part: str = "", contents: bool = True) -> list[str]:
    """The files that differ from the manifest, one line each; empty for an intact checkpoint.

    part: compare only the files in this subfolder, such as "params".
    contents: compare digests, not only sizes; this reads all files.
    """
    try:
        files = _read(folder)
    except FileNotFoundError:
        return [f"{NAME} is missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [f"{NAME} is damaged"]
    compared = {name: file for name, file in files.items() if name.startswith(f"{part}/" if part else "")}
    if is_remote(folder):
        stored = remote.listed(folder)
        compare = lambda name: _difference_stated(folder / name, stored.get(name), compared[name], contents)
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            differences = pool.map(compare, compared)
            return [f"{name} {difference}" for name, difference in zip(compared, differences) if difference]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        differences = pool.map(lambda name: _difference(folder / name, compared[name], contents), compared)
        return [f"{name} {difference}" for name, difference in zip(compared, differences) if difference]


def digest(folder: AnyPath, *, part: str) -> str:
    """A digest of the manifest's entries for the subfolder `part`."""
    files = {name: dataclasses.asdict(file) for name, file in _read(folder).items() if name.startswith(f"{part}/")}
    return _digest_of(json.dumps(files, sort_keys=True).encode())


def lists(folder: AnyPath, *, part: str) -> bool:
    """Whether the manifest lists any file in the subfolder `part`. True for a damaged manifest: see `problems`."""
    try:
        return any(name.startswith(f"{part}/") for name in _read(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return True


def sync_folder(folder: pathlib.Path) -> None:
    """Sync a folder to the disk. Otherwise a power cut may undo a rename in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _text(entries: dict[str, File]) -> str:
    return json.dumps(_signed({name: dataclasses.asdict(file) for name, file in entries.items()}), indent=0) + "\n"


def _signed(files: dict) -> dict:
    """The manifest's JSON: the entries, and a digest of them."""
    return {"digest": DIGEST, "files": files, "own": _digest_of(json.dumps(files, sort_keys=True).encode())}


def _read(folder: AnyPath) -> dict[str, File]:
    stored = json.loads((folder / NAME).read_text(encoding="utf-8"))
    if stored != _signed(stored["files"]):
        raise ValueError("the manifest is not what was written")
    if outside := [name for name in stored["files"] if pathlib.PurePath(name).is_absolute() or ".." in name.split("/")]:
        raise ValueError(f"{outside[0]} is not in the checkpoint")
    return {name: File(**file) for name, file in stored["files"].items()}


def _difference(path: pathlib.Path, file: File, contents: bool) -> str | None:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is no file"
        if status.st_size != file.size:
            return f"has {status.st_size} bytes, not {file.size}"
        if contents and not _has(path, file.digest):
            return "has other contents than were written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def _stated(info: dict[str, Any]) -> File:
    return File(int(info["size"]), next(iter(remote.checksums(info)), ""))


def _difference_stated(path: AnyPath, info: dict[str, Any] | None, file: File, contents: bool) -> str | None:
    """As `_difference`, of an object, by what its store says about it, or of one that was copied, by its content."""
    if info is None:
        return "is missing"
    if int(info["size"]) != file.size:
        return f"has {info['size']} bytes, not {file.size}"
    of_store = not file.digest or ":" in file.digest
    same = file.digest in (remote.checksums(info) or [""]) if of_store else not contents or _has(path, file.digest)
    return None if same else "has other contents than were written"


def _digest_synced(path: pathlib.Path) -> File:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return File(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, _hash).hexdigest())


def _has(path: AnyPath, digest: str) -> bool:
    """Whether the file has the digest. True for a store's checksum that cannot be computed from the content."""
    kind, _, value = digest.rpartition(":")
    if not value or kind not in ("", "md5Hash"):
        return True
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "md5" if kind else _hash).digest()
    return value == (base64.b64encode(content).decode() if kind else content.hex())


def _digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _hash():
    return hashlib.blake2b(digest_size=16)
