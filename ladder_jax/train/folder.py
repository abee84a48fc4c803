"""A run's folder: whose it is, and what may change when its run is resumed."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

from ladder_jax.config import RunConfig, to_dict
from ladder_jax.errors import RunFailed, UserError

# What may change when a run is resumed: where and how the same numbers are computed, what is shown and kept of them,
# and what becomes of steps that would end the run.
FREE = ("mesh.", "run.", "decode.", "train.loop", "train.remat", "train.accumulate", "train.sequence_parallel",
        "train.loss_chunk", "train.log_every", "train.checkpoint_every", "train.keep_", "train.evaluat",
        "train.on_bad_step", "train.spike_", "train.max_bad_steps", "train.rollback_batches",
        "train.peak_tflops")  # fmt: skip

CONFIG = "config.json"
_PARTIAL = ".tmp"  # of a file that a kill left half written
_LOCK = ".lock"
_EARLIER = (_LOCK, "goodput.json")  # made before config.json: what a run leaves that had no memory, or was killed


def path_of(config: RunConfig) -> pathlib.Path:
    return pathlib.Path(config.run.dir or pathlib.Path("runs") / config.run.name).expanduser().absolute()


def check(config: RunConfig, folder: pathlib.Path) -> None:
    """Raises UserError where `folder` belongs to a run of another configuration, or to something else."""
    file = folder / CONFIG
    if not file.is_file():
        if folder.exists() and (not folder.is_dir() or any(map(_foreign, folder.iterdir()))):
            raise UserError(f"run.dir={str(folder)!r} is not empty and holds no config.json: not a run's folder")
        return
    try:
        before = _flat(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise UserError(f"{str(file)!r} cannot be read as JSON") from None
    after = _flat(to_dict(config))
    before = _flat(to_dict(RunConfig())) | before  # a setting that is newer than the run was at its default
    changed = [
        f"{key} was {before.get(key)!r}, now {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(FREE)
    ]
    if changed:
        raise UserError(
            f"{str(folder)!r} holds a run of another configuration ({'; '.join(changed)}):"
            " change it back, or choose another run.dir"
        )


def _foreign(file: pathlib.Path) -> bool:
    return file.name not in _EARLIER and not file.name.endswith(_PARTIAL)


def describe(config: RunConfig) -> str:
    """The resolved configuration, a line a section."""
    sections = ((name, _flat(section)) for name, section in to_dict(config).items())
    return "\n".join(f"{name}: {' '.join(f'{k}={v}' for k, v in flat.items())}" for name, flat in sections)


@contextlib.contextmanager
def owned(folder: pathlib.Path) -> Iterator[None]:
    """Makes the folder, and holds it against another process that would train in it: UserError there.

    The lock goes with the process, however that ends, and the file that carries it stays: NFS keeps other hosts out by
    a regular file that is open for writing, and by nothing else. Of the processes of one run the first has it.
    RunFailed where the folder cannot be written to.
    """
    if jax.process_index() > 0:
        yield
        return
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is training in {str(folder)!r}") from None
        except OSError as error:  # a file system without locks: then nobody is kept out
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                raise
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def writing(folder: pathlib.Path) -> Iterator[None]:
    """A disk that refuses is one line."""
    try:
        yield
    except OSError as error:
        raise RunFailed(f"cannot write into {str(folder)!r}: {error.strerror}") from None


def write_atomically(file: pathlib.Path, text: str) -> None:
    temporary = file.with_name(file.name + _PARTIAL)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    return {key: value for name, below in tree.items() for key, value in _flat(below, f"{prefix}{name}.").items()}
