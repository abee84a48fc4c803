"""Write checkpoints in the background, each completely or not at all, and keep those that the rules
say.

A step is written into the folder `<step>`. Its manifest comes last, when all other files are on the
disk: without one a step is unfinished, whenever the process or the machine died, and is removed
before the next save. Only after it older checkpoints are removed. With several processes, each
writes its own shards and reports success or an error. Process 0 does the rest, and tells all others
the outcome: a save succeeds on all processes or fails on all.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from ladder_jax import remote
from ladder_jax.checkpoint import arrays, manifest, saved, writing
from ladder_jax.checkpoint.saved import Texts, open_checkpoint, steps, unfinished_steps
from ladder_jax.checkpoint.writing import Write
from ladder_jax.config import Json, RunConfig
from ladder_jax.config.fields import check_type, natural
from ladder_jax.errors import UserError, unknown, whole
from ladder_jax.files import AnyPath, absolute, is_remote, patiently, reason
from ladder_jax.nn import Params
from ladder_jax.processes.agreement import TIMEOUT, Agreement, first_of

type Items = Mapping[str, Params]  # pytrees of arrays, by the names of a checkpoint's items


@dataclasses.dataclass(frozen=True)
class Keep:
    """last: how many of the newest to keep. every: also keep the steps divisible by it. best: also
    keep that many with the lowest held-out loss. 0 turns a rule off. The newest is always kept.
    """

    last: int = 1
    every: int = 0
    best: int = 0


class Store:
    """Writes a run's checkpoints into `folder`, one at a time. `failure()` says why the last one
    failed.

    With several processes, each constructs a Store and makes the same calls of `save`, `wait` and
    `close`.
    timeout: seconds to wait for another process; after that the run fails.
    """

    def __init__(self, folder: str | AnyPath, *, config: RunConfig, timeout: float = TIMEOUT):
        check_type("config", config, RunConfig)
        check_type("folder", folder, str, os.PathLike)
        self.folder = absolute(folder)
        self._config = config
        self._timeout = timeout
        train = config.train
        self._keep = Keep(last=train.keep_checkpoints, every=train.keep_every, best=train.keep_best)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._saving: concurrent.futures.Future | None = None
        self._failure: str | None = None
        # for the caller's thread, and then for that of the save
        self._agreement = Agreement("save", timeout=timeout)
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            patiently(self.folder, self._clear)

    def save(
        self,
        step: int,
        *,
        params: Params,
        optimizer: Params,
        data: Json | None = None,
        validation_loss: float | None = None,
    ) -> None:
        """Copy the arrays to the host, then write them in the background. Waits first for the
        previous save.
        """
        step = whole("step", step, least=0)
        self.wait()
        writing.quieten()
        texts = saved.texts(
            self._config, step=step, data=data or {}, validation_loss=validation_loss
        )
        items = {"params": params, "optimizer": optimizer}
        items = jax.tree.map(jnp.asarray, items)  # a caller's may be NumPy's

        prepare = lambda: patiently(self.folder, lambda: self._prepare(step, items))
        what = f"room for the checkpoint of step {step}"
        if error := self._agreement.broadcast(what, lambda: _error_of(prepare)):
            self._fail(step, error)
            return
        folder = self.folder / str(step)
        writes = []

        def begin() -> None:
            for item, tree in items.items():
                writes.extend(writing.begin(folder / item, tree))

        error = _error_of(begin)
        shapes = {item: arrays.shapes_of(tree) for item, tree in items.items()}
        self._saving = self._pool.submit(self._finish, step, writes, error, shapes, texts)

    def failure(self) -> str | None:
        """Why the last save since the previous call failed, in a line; None if none did. Does not
        wait.
        """
        failure = self._failure
        self._failure = None
        return failure

    def wait(self) -> None:
        """Wait until the last save has succeeded or failed. Raises RunFailed if other processes do
        not answer.
        """
        if self._saving is not None:
            self._saving.result()

    def close(self) -> None:
        self._pool.shutdown()

    def _prepare(self, step: int, items: Items) -> None:
        """Create an empty folder to write into. One exists if the run went back to an earlier
        step.
        """
        self._clear()
        remove(self.folder / str(step))
        (self.folder / str(step)).mkdir(parents=True)
        if not is_remote(self.folder):
            _check_room(self.folder, items)

    def _finish(
        self,
        step: int,
        writes: Sequence[Write],
        error: str | None,
        shapes: Mapping[str, arrays.Shapes],
        texts: Texts,
    ) -> None:
        # A shorter time-out than the other processes', so that a disk that hangs is reported to
        # them in time.
        within = 0.8 * self._timeout
        error = error or _error_of(lambda: writing.await_all(writes, within=within))
        writing.give_back_memory()

        folder = self.folder / str(step)

        def publish() -> None:
            for item, of_item in shapes.items():
                arrays.finish(folder / item, of_item)
            saved.publish(folder, texts)
            # the new checkpoint is complete, and the next save prunes again
            with contextlib.suppress(Exception):
                self._prune()

        patient = lambda: patiently(folder, publish)
        what = f"the checkpoint of step {step}"
        error, whose = first_of(self._agreement.gather(what, error))
        if error is None:
            error = self._agreement.broadcast(what, lambda: _error_of(patient))
        if error:
            self._fail(step, error + whose)

    def _prune(self) -> None:
        losses = {}
        for step in steps(self.folder):
            # a damaged one, or one that cannot be read just now, is neither counted nor removed
            with contextlib.suppress(UserError):
                losses[step] = open_checkpoint(self.folder / str(step)).validation_loss
        for step in steps_to_remove(losses, keep=self._keep):
            remove(self.folder / str(step))

    def _fail(self, step: int, why: str) -> None:
        """Earlier checkpoints are unchanged, and unfinished files removed."""
        self._failure = f"the checkpoint of step {step} could not be written: {why}"
        # the disk or the store is as it was; the next save clears again
        with contextlib.suppress(Exception):
            if jax.process_index() == 0:
                self._clear()

    def _clear(self) -> None:
        """Remove folders that a kill or a failure left half written or half removed."""
        for step in unfinished_steps(self.folder):
            remove(self.folder / str(step))


def remove(folder: AnyPath, *, whole: bool = False) -> None:
    """Remove one step's folder. The manifest goes first, without which it does not count.

    whole: on a disk, raises OSError where a part stays; else the next save tries again.
    """

    def stays(function, path, error):
        if whole and not isinstance(error, FileNotFoundError):  # as a run prunes, too
            raise error

    if is_remote(folder):
        return remote.remove(folder, first=manifest.NAME)
    (folder / manifest.NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, onexc=stays)


def parse_keep(words: str) -> Keep:
    """Parse `last=3,every=1000,best=1`; each rule may be left out. Raises UserError for anything
    else.
    """
    names = [field.name for field in dataclasses.fields(Keep)]
    values = {}
    for word in words.split(","):
        name, _, value = word.strip().partition("=")
        if name not in names:
            raise unknown("rule of --prune", name, names)
        least = 1 if name == "last" else 0
        values[name] = natural(value)
        if values[name] < least:
            raise UserError(
                f"--prune {name}={value}: {name} must be a whole number, at least {least}"
            )
    return Keep(**values)


def steps_to_remove(losses: Mapping[int, float | None], *, keep: Keep) -> list[int]:
    """losses: the held-out loss of each step's checkpoint; None if it was not measured.

    One of NaN is never the best.
    """
    steps = sorted(losses)
    measured = {
        step: loss for step, loss in losses.items() if loss is not None and not math.isnan(loss)
    }
    by_loss = sorted(measured, key=lambda step: (measured[step], -step))
    kept = set(steps[-keep.last :])
    kept.update(by_loss[: keep.best])
    if keep.every:
        kept.update(step for step in steps if step % keep.every == 0)
    return [step for step in steps if step not in kept]


def _check_room(folder: pathlib.Path, items: Items) -> None:
    """Raises OSError if the disk has less free space than the arrays need: half-way through, the
    run's log would find it full, too.
    """
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(items))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: {needed / 1e6:,.1f} MB needed, {free / 1e6:,.1f} free",
        )


def _error_of(work: Callable[[], None]) -> str | None:
    """Calls `work`. Returns its error in one line, None if it succeeded."""
    try:
        work()
    # Orbax, tensorstore and fsspec have no common error for a failed write
    except Exception as error:
        return reason(error)
    return None
