"""Write checkpoints in the background, each completely or not at all.

A step is written into the folder `writing.<step>`. Then its manifest is written, all files are synced, the folder is
renamed to `<step>`, and only then are older checkpoints removed. So a folder named `<step>` is complete, whenever the
process or the machine dies. With several processes, each writes its own shards and reports success or an error.
Process 0 does the rest, and tells all others the outcome: a save succeeds on all processes or fails on all.

An object store has no renames. There a step is written into `<step>` itself, and counts once its manifest is written;
what has none is removed before the next save.
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from ladder_jax.checkpoint import manifest, retention
from ladder_jax.checkpoint.quiet import WRITING, Quiet
from ladder_jax.checkpoint.saved import FORMAT, VERSION, open_checkpoint, reason, steps, unfinished_steps
from ladder_jax.checkpoint.writing import Writing
from ladder_jax.config import RunConfig, to_dict
from ladder_jax.errors import RunFailed, UserError, wrong_type
from ladder_jax.files import AnyPath, absolute, is_remote
from ladder_jax.nn import Params
from ladder_jax.processes.agreement import PATIENCE, Agreement, first_of

ABANDONED = 10.0  # seconds within which the abandoned writes of a failed save end


@dataclasses.dataclass(frozen=True)
class Failure:
    """A checkpoint could not be written. Earlier checkpoints are unchanged. newest: the step of the last of them."""

    step: int
    reason: str
    newest: int | None

    def __str__(self) -> str:
        kept = "there is none before it" if self.newest is None else f"the newest is that of step {self.newest}"
        return f"the checkpoint of step {self.step} could not be written: {self.reason} ({kept})"


class Store:
    """Writes a run's checkpoints into `folder`, one at a time. `failure()` returns the last failure.

    With several processes, each constructs a Store and makes the same calls of `save`, `wait` and `close`.
    patience: seconds to wait for another process; after that the run fails.
    """

    def __init__(self, folder: str | AnyPath, *, config: RunConfig, patience: float = PATIENCE):
        if not isinstance(config, RunConfig):
            raise wrong_type("config", config, RunConfig)
        if not isinstance(folder, str | os.PathLike):
            raise wrong_type("folder", folder, str, os.PathLike)
        self.folder, self._config, self._patience = absolute(folder), config, patience
        self._remote = is_remote(folder)
        train = config.train
        self._keep = retention.Keep(last=train.keep_checkpoints, every=train.keep_every, best=train.keep_best)
        self._thread: threading.Thread | None = None
        self._failure: Failure | None = None
        self._disagreement: RunFailed | None = None
        self._start, self._end = (Agreement(name, patience=patience) for name in ("save", "saved"))
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear()
        self._quiet: Quiet | None = None
        self._failures = 0

    def save(
        self,
        step: int,
        *,
        params: Params,
        optimizer: Params,
        data: dict[str, Any] | None = None,
        validation_loss: float | None = None,
    ) -> None:
        """Copy the arrays to the host, then write them in the background. Waits first for the previous save."""
        self.wait()
        self._quiet = self._quiet or Quiet()
        meta = {"format": FORMAT, "version": VERSION, "manifest": manifest.NAME, "step": step, "time": time.time()}
        meta |= {"validation_loss": validation_loss, "config": to_dict(self._config)}
        items = {"params": params, "optimizer": optimizer}
        outcome = self._start.decided(f"room for the checkpoint of step {step}", lambda: self._prepare(step, items))
        if outcome["reason"]:
            self._failed(step, outcome)
            return
        writing = Writing(self._unfinished(step), items)
        texts = {"data": {"step": step, **(data or {})}, "meta": meta}
        self._thread = threading.Thread(target=self._finish, args=(step, writing, texts), name=f"checkpoint {step}")
        self._thread.start()

    def failure(self) -> Failure | None:
        """The last failure since the previous call, or None. Does not wait."""
        failure, self._failure = self._failure, None
        return failure

    def wait(self) -> None:
        """Wait until the last save has succeeded or failed. Raises RunFailed if other processes do not answer."""
        self._join()
        if self._disagreement is not None:
            raise self._disagreement

    def close(self) -> None:
        self._join()
        if self._quiet is not None:
            self._quiet.close(after=ABANDONED if self._failures else 0)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _prepare(self, step: int, items: dict[str, Params]) -> dict[str, Any]:
        """Create empty folders to write into. The run's own folder may have been removed meanwhile."""

        def create() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._remote:
                _check_room(self.folder, *items.values())
            self._clear()
            if self._remote:  # exists if the run went back to an earlier step
                retention.remove(self._unfinished(step))
            for item in items:
                (self._unfinished(step) / item).mkdir(parents=True)

        return self._outcome(_error_of(create))

    def _finish(self, step: int, writing: Writing, texts: dict[str, Any]) -> None:
        # A shorter time-out than the other processes', so that a disk that hangs is reported to them in time.
        error = _error_of(lambda: writing.wait(within=0.8 * self._patience))

        def conclude(errors: list[str | None]) -> dict[str, Any]:
            first, whose = first_of(errors)
            return self._outcome(first + whose if first else _error_of(lambda: self._publish(step, writing, texts)))

        try:
            outcome = self._end.concluded(f"the checkpoint of step {step}", error, conclude)
        except RunFailed as failure:
            self._disagreement = failure
            return
        if outcome["reason"]:
            self._failed(step, outcome)

    def _publish(self, step: int, writing: Writing, texts: dict[str, Any]) -> None:
        writing.finish(texts)
        if not self._remote:
            retention.remove(self.folder / str(step))  # exists if the run went back to an earlier step
            self._unfinished(step).rename(self.folder / str(step))
            manifest.sync_folder(self.folder)
        with contextlib.suppress(OSError):  # the new checkpoint is complete, and the next save prunes again
            self._prune()

    def _prune(self) -> None:
        losses = {step: loss_of(self.folder / str(step)) for step in steps(self.folder)}
        for step in retention.steps_to_remove(losses, keep=self._keep):
            retention.remove(self.folder / str(step))

    def _outcome(self, reason: str | None) -> dict[str, Any]:
        """The outcome that all processes get. After a failure, removes the unfinished files, to free the disk."""
        if reason is None:
            return {"reason": None, "newest": None}
        try:
            self._clear()
            return {"reason": reason, "newest": max(steps(self.folder), default=None)}
        except OSError as error:  # the folder cannot even be listed
            raise RunFailed(f"cannot read {str(self.folder)!r}: {error.strerror}") from None

    def _failed(self, step: int, outcome: dict[str, Any]) -> None:
        self._failures += 1
        self._failure = Failure(step, outcome["reason"], outcome["newest"])

    def _clear(self) -> None:
        """Remove folders that a kill or a failure left half written or half removed."""
        if self._remote:
            for step in unfinished_steps(self.folder):
                retention.remove(self.folder / str(step))
            return
        for leftover in (*self.folder.glob(f"{WRITING}*"), *self.folder.glob(f"{retention.DELETING}*")):
            shutil.rmtree(leftover, ignore_errors=True)

    def _unfinished(self, step: int) -> AnyPath:
        """The folder to write into. A new name after each failure: its abandoned writes may still be running."""
        if self._remote:
            return self.folder / str(step)
        return self.folder / f"{WRITING}{step}{f'.{self._failures}' if self._failures else ''}"


def loss_of(folder: AnyPath) -> float | None:
    """The held-out loss stored in a checkpoint; None if it was not measured, or the checkpoint is damaged."""
    try:
        return open_checkpoint(folder).validation_loss
    except UserError:  # damaged: never the best
        return None


def _error_of(work: Callable[[], None]) -> str | None:
    """Calls `work`. Returns its error in one line, None if it succeeded."""
    try:
        work()
    except Exception as error:  # Orbax and tensorstore have no common error for a failed write
        return reason(error)
    return None


def _check_room(folder: pathlib.Path, *trees: Params) -> None:
    """Raises OSError if the disk has less free space than the arrays need: better now than half-way through."""
    needed, free = sum(leaf.nbytes for leaf in jax.tree.leaves(trees)), shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed / 1e6:,.1f} MB needed, {free / 1e6:,.1f} free"
        )
