"""metrics.jsonl: one object a logged step, no step twice; TensorBoard and Weights & Biases show the same rows.

A line that cannot be written (a full disk) is kept and written with a later one.
"""

import contextlib
import json
import math
import os
import pathlib
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from ladder_jax.config import RunConfig, to_dict
from ladder_jax.errors import UserError
from ladder_jax.train.folder import write_atomically
from ladder_jax.train.mirror import Mirror

Row = dict[str, Any]
NAME, WANDB_ID = "metrics.jsonl", "wandb-id"


class Tracker(Protocol):
    """Another place that shows the metrics."""

    def begin(self, rows: list[Row]) -> None:
        """Show exactly `rows`: at the start, and after a return to an earlier step."""

    def add(self, row: Row) -> None: ...

    def close(self) -> None: ...


def read(folder: pathlib.Path) -> list[Row]:
    """The logged steps of a run's folder. Lines that are no rows are left out: a kill cuts the last one short."""
    file, rows = folder / NAME, []
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


class Metrics:
    """Logs a run's steps into its folder, from `step` on: rows after it are dropped, as those steps are made again.

    Process 0 reads and writes. rows: those logged before. mirror: uploads the folder, if the run's is elsewhere.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        step: int,
        trackers: Sequence[Tracker] = (),
        mirror: Mirror | None = None,
        say: Callable[[str], None],
    ):
        self._file, self._trackers, self._say = folder / NAME, trackers, say
        self._mirror = mirror or Mirror(folder, folder, say=say)
        self._unwritten: list[str] = []
        self._size = 0
        self.rows: list[Row] = []
        self.rewind(step)

    def rewind(self, step: int, *, then: Row | None = None) -> None:
        """Drop the rows after `step`, and add `then`; `rows` is the result."""
        self._unwritten.clear()
        if jax.process_index() > 0:
            return
        self.rows = [row for row in read(self._file.parent) if row["step"] <= step]
        self.rows += [] if then is None else [then]
        write_atomically(self._file, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._size = self._file.stat().st_size
        for tracker in self._trackers:
            tracker.begin(self.rows)

    def without_loss(self, step: int) -> Row | None:
        """The row of `step`, the last one, if no held-out loss stands in it."""
        last = self.rows[-1] if self.rows else {}
        return last if last.get("step") == step and "validation_loss" not in last else None

    def add(self, row: Row) -> Row:
        """Numbers that JSON does not have (nan, infinity) become null."""
        row = {key: None if _is_no_number(value) else value for key, value in row.items()}
        if jax.process_index() == 0:
            self._write(json.dumps(row) + "\n")
            for tracker in self._trackers:
                tracker.add(row)
            self._mirror.upload(force=False)
        return row

    def sync(self) -> None:
        """Onto the disk, before a checkpoint of these steps is written."""
        if jax.process_index() == 0:
            self._write("", sync=True)
            self._mirror.upload()

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def _write(self, line: str, *, sync: bool = False) -> None:
        self._unwritten += [line] if line else []
        try:
            if not self._file.exists():  # the user has removed it, or the whole folder
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.touch()
                self._size = 0
                self._say(f"{self._file} was gone: begun again")
            with self._file.open("r+b") as file:
                file.truncate(self._size)  # removes a line that was written in part
                file.seek(self._size)
                file.write("".join(self._unwritten).encode())
                file.flush()
                size = file.tell()
                if sync:
                    os.fsync(file.fileno())
        except OSError as error:
            if len(self._unwritten) == 1:
                self._say(f"{self._file.name} cannot be written: {error.strerror}; its lines are kept until it can")
            return
        self._size, self._unwritten = size, []


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def trackers(config: RunConfig, *, folder: pathlib.Path) -> list[Tracker]:
    """Those that `config` sets. Raises UserError for one that is not installed."""
    local: list[Tracker] = [TensorBoard(folder / "tensorboard")] if config.run.tensorboard else []
    return local + ([WandB(config, folder=folder)] if config.run.wandb else [])


class TensorBoard:
    """One event file, rewritten from the rows whenever a run is resumed, so that no step is in it twice."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._writer: Any = None

    def begin(self, rows: list[Row]) -> None:
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event

        self.close()
        # A full disk costs these events, never the run; the next start writes them again.
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            for old in self._folder.glob("events.out.tfevents.*"):
                old.unlink()
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
            self._writer = RecordWriter(str(self._folder / name))
            self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            for row in rows:
                self._writer.write(_event(row))
            self._writer.flush()

    def add(self, row: Row) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(_event(row))
            self._writer.flush()
        except OSError:
            self.close()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()


class WandB:
    """A run of Weights & Biases, whose id is kept in the run's folder.

    Of a step that is made twice (after a kill, or a rollback) it keeps the first row.
    """

    def __init__(self, config: RunConfig, *, folder: pathlib.Path):
        try:
            import wandb
        except ImportError:
            raise UserError(
                f"run.wandb={config.run.wandb} needs Weights & Biases: pip install 'ladder-jax[wandb]'"
            ) from None
        self._wandb, self._config, self._folder = wandb, config, folder
        self._run: Any = None

    def begin(self, rows: list[Row]) -> None:
        if self._run is not None:
            return
        try:
            self._run = self._wandb.init(
                project=self._config.run.wandb,
                name=self._config.run.name,
                id=self._identity(),
                resume="allow",
                dir=str(self._folder),
                config=to_dict(self._config),
            )
        except self._wandb.Error as error:
            raise UserError(f"run.wandb={self._config.run.wandb}: {str(error).splitlines()[0]}") from None

    def add(self, row: Row) -> None:
        self._run.log({key: value for key, value in row.items() if value is not None}, step=row["step"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _identity(self) -> str:
        file = self._folder / WANDB_ID
        if not file.is_file():
            file.write_text(uuid.uuid4().hex, encoding="utf-8")
        return file.read_text(encoding="utf-8")


def _event(row: Row) -> bytes:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    numbers = {key: value for key, value in row.items() if isinstance(value, float) and key != "time"}
    values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
    return Event(wall_time=row.get("time", 0.0), step=row["step"], summary=Summary(value=values)).SerializeToString()
