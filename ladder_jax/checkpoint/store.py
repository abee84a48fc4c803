"""Checkpoints are written in the background, and take their place only when they are whole.

A step is written into `writing.<step>` by Orbax, then its manifest is made and all of it synced, then the folder is
renamed `<step>`, and only then do older ones go. So whenever the process or the machine dies, what is called `<step>`
is whole. On several processes each writes its own shards; Orbax waits for all of them, and the rest is the first
process's.
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import shutil
import threading
import time
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from ladder_jax.checkpoint import arrays, manifest, retention
from ladder_jax.checkpoint.quiet import Quiet
from ladder_jax.checkpoint.saved import FORMAT, VERSION, open_checkpoint, reason, steps
from ladder_jax.config import RunConfig, to_dict
from ladder_jax.errors import UserError
from ladder_jax.nn import Params

WRITING = "writing."
LATE = 10.0  # seconds in which a failed save's writes end


@dataclasses.dataclass(frozen=True)
class Failure:
    """A checkpoint that could not be written. Those before it are as they were."""

    step: int
    reason: str
    newest: int | None

    def __str__(self) -> str:
        kept = "there is none before it" if self.newest is None else f"the newest is that of step {self.newest}"
        return f"the checkpoint of step {self.step} could not be written: {self.reason} ({kept})"


class Store:
    """Writes a run's checkpoints into `folder`, one at a time. A failure is kept until `failure()` is asked for it."""

    def __init__(self, folder: pathlib.Path, *, config: RunConfig):
        self.folder, self._config = folder.absolute(), config
        self._keep = retention.of(config.train)
        self._thread: threading.Thread | None = None
        self._failure: Failure | None = None
        self._first = jax.process_index() == 0
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clear()
        self._checkpointer = _checkpointer()
        self._quiet, self._failures = Quiet(), 0

    def save(
        self,
        step: int,
        *,
        params: Params,
        optimizer: Params,
        data: dict[str, Any] | None = None,
        validation_loss: float | None = None,
    ) -> None:
        """Copy to the host, then write in the background; waits first for the save before."""
        self.wait()
        meta = {"format": FORMAT, "version": VERSION, "manifest": manifest.NAME, "step": step, "time": time.time()}
        meta |= {"validation_loss": validation_loss, "config": to_dict(self._config)}
        items = ocp.args.Composite(
            params=ocp.args.PyTreeSave(params, save_args=_chunks(params)),
            optimizer=ocp.args.PyTreeSave(optimizer),
            data=ocp.args.JsonSave({"step": step, **(data or {})}),
            meta=ocp.args.JsonSave(meta),
        )
        wanted = {"params": set(arrays.shapes(params)), "optimizer": set(arrays.shapes(optimizer))}
        try:
            _check_room(self.folder, params, optimizer)
            self._clear()
            self._checkpointer.save(self._writing(step), args=items)
        except Exception as error:  # Orbax and tensorstore have no common error for a disk that refuses
            self._failed(step, error)
            return
        self._thread = threading.Thread(target=self._finish, args=(step, wanted), name=f"checkpoint {step}")
        self._thread.start()

    def failure(self) -> Failure | None:
        """What went wrong since this was last asked; it does not wait."""
        failure, self._failure = self._failure, None
        return failure

    def wait(self) -> None:
        """Until the last save has taken its place, or failed."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoint")

    def close(self) -> None:
        self.wait()
        self._checkpointer.close()
        self._quiet.close(after=LATE if self._failures else 0)

    def _finish(self, step: int, wanted: dict[str, set[str]]) -> None:
        writing = self._writing(step)
        try:
            self._checkpointer.wait_until_finished()
            if not self._first:
                return
            for item, names in wanted.items():
                arrays.check_listed(writing / item, names)
            manifest.write(writing)
            retention.remove(self.folder / str(step))  # what a run that went back had saved
            writing.rename(self.folder / str(step))
            manifest.sync_folder(self.folder)
            with contextlib.suppress(OSError):  # the new one is safe, and the next save prunes again
                self._prune()
        except Exception as error:
            self._failed(step, error)

    def _prune(self) -> None:
        losses = {step: loss_of(self.folder / str(step)) for step in steps(self.folder)}
        for step in retention.doomed(losses, keep=self._keep):
            retention.remove(self.folder / str(step))

    def _failed(self, step: int, error: Exception) -> None:
        """Frees what was written of it, and starts Orbax anew: the next save owes nothing to this one."""
        self._failures += 1
        newest = steps(self.folder)
        self._failure = Failure(step, reason(error), newest[-1] if newest else None)
        self._clear()
        self._checkpointer = _checkpointer()

    def _clear(self) -> None:
        """Remove what a kill or a failure has left half written or half removed."""
        for left in (*self.folder.glob(f"{WRITING}*"), *self.folder.glob(f"{retention.DELETING}*")):
            if self._first:
                shutil.rmtree(left, ignore_errors=True)

    def _writing(self, step: int) -> pathlib.Path:
        return self.folder / f"{WRITING}{step}"


def loss_of(folder: pathlib.Path) -> float | None:
    """The held-out loss that a checkpoint was saved with."""
    try:
        return open_checkpoint(folder).validation_loss
    except UserError:  # damaged: never the best
        return None


def _checkpointer() -> ocp.AsyncCheckpointer:
    return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())


def _chunks(params: Params) -> Params:
    """A chunk holds one layer of a stack, so that inference can read one."""

    def of(path, array):
        return ocp.SaveArgs(shard_axes=(0,) if getattr(path[0], "key", None) == "layers" else ())

    return jax.tree_util.tree_map_with_path(of, params)


def _check_room(folder: pathlib.Path, *trees: Params) -> None:
    """Raises an error where the disk has less room than the arrays need: cheaper than finding out in the middle."""
    needed, free = sum(leaf.nbytes for leaf in jax.tree.leaves(trees)), shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed / 1e6:,.1f} MB needed, {free / 1e6:,.1f} free"
        )
