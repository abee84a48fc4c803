"""metrics.jsonl: one object a logged step, no step twice. The rest (TensorBoard, Weights & Biases) follows it.

A line that cannot be written (a full disk) is kept and written with a later one.
"""

import json
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from ladder_jax.train.folder import write_atomically

Row = dict[str, Any]
NAME = "metrics.jsonl"


class Tracker(Protocol):
    """Another place that shows the metrics."""

    def begin(self, rows: list[Row]) -> None:
        """Show exactly `rows`: at the start, and after a return to an earlier step."""

    def add(self, row: Row) -> None: ...

    def close(self) -> None: ...


def read(folder: pathlib.Path) -> list[Row]:
    """The logged steps of a run's folder. A last line that a kill cut short is left out."""
    file, rows = folder / NAME, []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


class Metrics:
    """Logs a run's steps into its folder, from `step` on: what was logged after it is about to be made again.

    Process 0 reads and writes. `rows` is what was there already.
    """

    def __init__(
        self, folder: pathlib.Path, *, step: int, trackers: Sequence[Tracker] = (), say: Callable[[str], None]
    ):
        self._file, self._trackers, self._say = folder / NAME, trackers, say
        self._late: list[str] = []
        self._size = 0
        self.rows: list[Row] = []
        self.rewind(step)

    def rewind(self, step: int, *, then: Row | None = None) -> None:
        """Drop what was logged after `step`, and put `then` in its place; `rows` is what is left."""
        self._late.clear()
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
        return row

    def sync(self) -> None:
        """Onto the disk, before a checkpoint says that these steps are made."""
        if jax.process_index() == 0:
            self._write("", sync=True)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def _write(self, line: str, *, sync: bool = False) -> None:
        self._late += [line] if line else []
        try:
            if not self._file.exists():  # somebody has removed it, or the whole folder
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.touch()
                self._size = 0
                self._say(f"{self._file} was gone: begun again")
            with self._file.open("r+b") as file:
                file.truncate(self._size)  # of a line that went in only half
                file.seek(self._size)
                file.write("".join(self._late).encode())
                file.flush()
                size = file.tell()
                if sync:
                    os.fsync(file.fileno())
        except OSError as error:
            if len(self._late) == 1:
                self._say(f"{self._file.name} cannot be written: {error.strerror}; its lines are kept until it can")
            return
        self._size, self._late = size, []


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
