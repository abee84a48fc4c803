"""A checkpoint's manifest: the size and digest of each of its files, to detect later changes. It is
written last.

Orbax stores no checksums of values. Digests are BLAKE2b of 128 bits, computed in threads (hashlib
releases the interpreter's lock) at about 1 GB/s each. In an object store they are the store's own
checksums, which it computes from the content, so that no object is read. A checkpoint that was
copied from a store to a disk is compared by sizes alone; one that was copied into a store is read
to compare it.
"""

import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
from typing import Any

from ladder_jax import files, remote
from ladder_jax.files import AnyPath, is_remote, read_text

NAME = "manifest.json"
# the manifest of a checkpoint that was put aside
DAMAGED = "manifest.damaged.json"
DIGEST = "blake2b-128"
# what object stores say of an object's content, the best first
CHECKSUMS = ("md5Hash", "crc32c", "ETag", "etag")
THREADS = 16
_HASH = functools.partial(hashlib.blake2b, digest_size=16)

type File = dict[str, Any]  # {"size": bytes, "digest": text}
type Files = dict[str, File]
type Info = dict[str, Any]  # the `size` of a file, and what an object store says of it

# What reading a changed manifest raises.
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def write(folder: AnyPath) -> None:
    """Write the manifest of all files in `folder`. On return, the files and the manifest are synced
    to the disk.
    """
    if is_remote(folder):
        entries = {name: _stated(info) for name, info in found(folder).items()}
    else:
        (folder / NAME).unlink(missing_ok=True)
        names = sorted(found(folder))
        entry = lambda name: _synced(folder / name)
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            entries = dict(zip(names, pool.map(entry, names)))
        for path in folder.rglob("*"):
            if path.is_dir():
                sync_folder(path)
    text = json.dumps(_signed(entries), indent=0)
    files.write(folder / NAME, [text.encode()], sync=True)
    if not is_remote(folder):
        sync_folder(folder)
        sync_folder(folder.parent)


def problems(folder: AnyPath, *, contents: tuple[str, ...] = ("",)) -> list[str]:
    """The files that differ from the manifest, one line each; empty for an intact checkpoint.

    contents: how the names of the files begin that are read, to compare their digests; of all
        others the sizes are compared.
    """
    try:
        listed = _read(folder)
    except FileNotFoundError:
        return [f"{NAME} is missing"]
    except OSError as error:
        return [f"{NAME} cannot be read: {files.reason(error)}"]
    except _DAMAGED:
        return [f"{NAME} is damaged"]
    there = found(folder)

    def difference(name: str) -> str | None:
        """What is wrong with a file, by the store's own checksum, or by reading it."""
        file = listed[name]
        info = there.get(name)
        if info is None:
            return "is missing"
        if int(info["size"]) != file["size"]:
            return f"has {info['size']} bytes, not {file['size']}"
        kind, _, digest = file["digest"].rpartition(":")
        now = digest
        if kind:  # a store's, which is not computed elsewhere
            now = info.get(kind, digest)
        elif digest and name.startswith(contents):
            try:
                with (folder / name).open("rb") as opened:
                    now = hashlib.file_digest(opened, _HASH).hexdigest()
            except OSError as error:
                if is_remote(folder):
                    raise
                return f"cannot be read: {files.reason(error)}"
        return None if now == digest else "has other contents than were written"

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        wrong = list(pool.map(difference, listed))
    return [f"{name} {why}" for name, why in zip(listed, wrong) if why]


def digest(folder: AnyPath, *, part: str) -> str:
    """A digest of the manifest's entries for the subfolder `part`."""
    entries = _read(folder)
    return _digest_of({name: entries[name] for name in entries if name.startswith(f"{part}/")})


def sync_folder(folder: pathlib.Path) -> None:
    """Sync a folder to the disk. Otherwise a power cut may undo a rename in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _signed(entries: Files) -> dict[str, Any]:
    """The manifest's JSON: the entries, and a digest of them."""
    return {"digest": DIGEST, "files": entries, "own": _digest_of(entries)}


def _read(folder: AnyPath) -> Files:
    stored = json.loads(read_text(folder / NAME))
    entries = stored["files"]
    if stored != _signed(entries):
        raise ValueError("the manifest is not what was written")
    return entries


def found(folder: AnyPath) -> dict[str, Info]:
    """The files below a folder, but for the manifest, with their `size` and what an object store
    says of them.
    """
    if is_remote(folder):
        there = remote.listed(folder)
    else:
        there = {name: {"size": size} for name, size in files.sizes(folder).items()}
    there.pop(NAME, None)
    return there


def _stated(info: Info) -> File:
    """The entry of an object. info: as in `remote.listed`."""
    kind = next((kind for kind in CHECKSUMS if info.get(kind)), None)
    digest = f"{kind}:{info[kind]}" if kind else ""
    return {"size": int(info["size"]), "digest": digest}


def _synced(path: pathlib.Path) -> File:
    with path.open("rb") as file:
        handle = file.fileno()
        os.fsync(handle)
        return {
            "size": os.fstat(handle).st_size,
            "digest": hashlib.file_digest(file, _HASH).hexdigest(),
        }


def _digest_of(entries: Files) -> str:
    text = json.dumps(entries, sort_keys=True)
    return _HASH(text.encode()).hexdigest()
