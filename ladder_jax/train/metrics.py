"""metrics.jsonl: one object a logged step, no step twice; TensorBoard and Weights & Biases show the
same rows.

A line that cannot be written (a full disk) is kept and written with a later one.
"""

import contextlib
import json
import math
import os
import pathlib
import tempfile
import time
import uuid
from collections.abc import Sequence
from typing import Any

import jax

from ladder_jax import files
from ladder_jax.config import RunConfig, to_dict
from ladder_jax.config.fields import not_none
from ladder_jax.errors import RunFailed, UserError, needed
from ladder_jax.files import AnyPath, explained, is_remote, patiently
from ladder_jax.terminal import Say

Row = dict[str, Any]
NAME = "metrics.jsonl"
WANDB_ID = "wandb-id"
EVERY = 60.0  # seconds between two uploads of lines


def read(folder: pathlib.Path) -> list[Row]:
    """The logged steps of a run's folder. Lines that are no rows are left out: a kill cuts the last
    one short.
    """
    file = folder / NAME
    if not file.is_file():
        return []
    rows = []
    for line in file.read_bytes().splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


class TensorBoard:
    """One event file, rewritten from the rows whenever a run is resumed, so that no step is in it
    twice.

    A full disk costs its events, never the run; the next start writes them again.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._writer: Any = None

    def begin(self, rows: list[Row]) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self.close()
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            for old in self._folder.glob("events.out.tfevents.*"):
                old.unlink()
            self._writer = EventsWriter(str(self._folder / "events"))
        self.add(*rows)

    def add(self, *rows: Row) -> None:
        if self._writer is None:
            return
        try:
            for row in rows:
                self._writer.write_event(_event(row))
            self._writer.flush()  # onto the disk: of a long run's rows once
        except OSError:
            self.close()

    def close(self) -> None:
        writer = self._writer
        self._writer = None
        if writer is None:
            return
        # the first leaves the file open where the disk is full, and Python would try again, aloud
        for close in (writer.close, writer._py_recordio_writer.close):
            with contextlib.suppress(OSError):
                close()


def _event(row: Row) -> Any:
    """TensorBoard's, of a row's numbers."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=key, simple_value=value)
        for key, value in row.items()
        if isinstance(value, float) and key != "time"
    ]
    summary = Summary(value=values)
    return Event(wall_time=row.get("time", 0.0), step=row["step"], summary=summary)


class WandB:
    """A run of Weights & Biases, whose id is kept in the run's folder.

    Of a step that is made twice (after a kill, or a rollback) it keeps the first row.
    """

    def __init__(self, config: RunConfig, *, folder: pathlib.Path):
        with needed(f"run.wandb={config.run.wandb} needs Weights & Biases", extra="wandb"):
            import wandb
        self._wandb = wandb
        self._config = config
        self._folder = folder
        self._run: Any = None

    def begin(self, rows: list[Row]) -> None:
        if self._run is not None:
            return
        identity = self._folder / WANDB_ID
        if not identity.is_file():
            files.write(identity, [uuid.uuid4().hex.encode()])
        try:
            self._run = self._wandb.init(
                project=self._config.run.wandb,
                name=self._config.run.name,
                id=identity.read_text(encoding="utf-8"),
                resume="allow",
                dir=str(self._folder),
                config=to_dict(self._config),
            )
        except self._wandb.Error as error:
            raise UserError(
                f"run.wandb={self._config.run.wandb}: {str(error).splitlines()[0]}"
            ) from None

    def add(self, row: Row) -> None:
        self._run.log(not_none(row), step=row["step"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def trackers(config: RunConfig, *, folder: pathlib.Path) -> list[TensorBoard | WandB]:
    """The other places that show the metrics. Raises UserError for one that is not installed."""
    found = []
    if config.run.tensorboard:
        found.append(TensorBoard(folder / "tensorboard"))
    if config.run.wandb:
        found.append(WandB(config, folder=folder))
    return found


class SmallFiles:
    """The small files of a run: in `local`, which is its folder, or of one in an object store a
    temporary folder that is uploaded.

    Metrics, TensorBoard's events and profiles grow line by line, and an object can only be written
    as a whole. They are uploaded before each checkpoint, at most EVERY seconds after a line, and at
    the end.
    """

    def __init__(self, folder: AnyPath, *, say: Say):
        self.local = folder
        self.say = say
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._uploaded: dict[str, tuple[int, int]] = {}  # the size and time of each file
        self._last = time.monotonic()
        if is_remote(folder):
            self._temporary = tempfile.TemporaryDirectory(prefix="ladder-jax-run-")
            self.local = pathlib.Path(self._temporary.name)

    def begin(self) -> None:
        """Copy what a run goes on with here, and remove the events, which are written anew. In
        process 0 alone.
        """
        if self._temporary is None or jax.process_index() > 0:
            return

        def copy() -> None:
            for name in (NAME, WANDB_ID):
                with contextlib.suppress(FileNotFoundError):
                    content = (self._folder / name).read_bytes()
                    (self.local / name).write_bytes(content)
            for path in self._folder.glob("tensorboard/events*"):
                path.unlink(missing_ok=True)

        with explained(self._folder, "read"):
            patiently(self._folder, copy)

    def upload(self, *, force: bool = True) -> None:
        """Upload all files that have changed. Without `force`, only EVERY seconds after the last
        time.

        A failure does not end the run: the next upload tries again.
        """
        if self._temporary is None or not force and time.monotonic() - self._last < EVERY:
            return
        self._last = time.monotonic()
        try:
            with explained(self._folder, "write into"):
                self._upload()
        except RunFailed as error:
            self.say(f"{error}; it is tried again with the next lines")

    def close(self) -> None:
        """Upload what is left, of every process."""
        self.upload()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _upload(self) -> None:
        there = {str(path.relative_to(self.local)): path for path in files.below(self.local)}
        for name, path in there.items():
            state = path.stat().st_size, path.stat().st_mtime_ns
            if self._uploaded.get(name) != state:
                (self._folder / name).write_bytes(path.read_bytes())
                self._uploaded[name] = state
        for name in self._uploaded.keys() - there.keys():
            (self._folder / name).unlink(missing_ok=True)
            del self._uploaded[name]


class Metrics:
    """Logs a run's steps into its folder, from `step` on: rows after it are dropped, as those steps
    are made again.

    Process 0 reads and writes.
    """

    def __init__(
        self, small: SmallFiles, *, step: int, trackers: Sequence[TensorBoard | WandB] = ()
    ):
        self._small = small
        self._file = small.local / NAME
        self._trackers = trackers
        self._unwritten: list[str] = []
        self._size = 0
        self.rewind(step)

    def rewind(self, step: int) -> None:
        """Drop the rows after `step`."""
        self._unwritten.clear()
        if jax.process_index() > 0:
            return
        rows = [row for row in read(self._file.parent) if row["step"] <= step]
        lines = [f"{json.dumps(row)}\n".encode() for row in rows]
        files.write(self._file, lines)
        self._size = self._file.stat().st_size
        for tracker in self._trackers:
            tracker.begin(rows)

    def add(self, row: Row) -> Row:
        """Numbers that JSON does not have (nan, infinity) become null."""
        is_json = lambda value: not isinstance(value, float) or math.isfinite(value)
        row = {key: value if is_json(value) else None for key, value in row.items()}
        if jax.process_index() == 0:
            self._write(json.dumps(row) + "\n")
            for tracker in self._trackers:
                tracker.add(row)
            self._small.upload(force=False)
        return row

    def sync(self) -> None:
        """Onto the disk, before a checkpoint of these steps is written."""
        if jax.process_index() == 0:
            self._write("", sync=True)
            self._small.upload()

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def _write(self, line: str, *, sync: bool = False) -> None:
        if line:
            self._unwritten.append(line)
        try:
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
                self._small.say(
                    f"{self._file.name} cannot be written: {error.strerror}; its lines are kept until it can"
                )
            return
        self._size = size
        self._unwritten = []
