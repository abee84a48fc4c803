"""Where else a run's metrics are shown: TensorBoard (on by default), Weights & Biases (an extra)."""

import contextlib
import pathlib
import socket
import time
import uuid
from typing import Any

from ladder_jax.config import RunConfig, to_dict
from ladder_jax.errors import UserError
from ladder_jax.train.metrics import Row, Tracker


def trackers(config: RunConfig, *, folder: pathlib.Path) -> list[Tracker]:
    """Those that `config` asks for. Raises UserError for one that is not installed."""
    wanted: list[Tracker] = [TensorBoard(folder / "tensorboard")] if config.run.tensorboard else []
    return wanted + ([WandB(config, folder=folder)] if config.run.wandb else [])


class TensorBoard:
    """One event file, made anew from the rows whenever a run goes on: no step stands in it twice."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._writer: Any = None

    def begin(self, rows: list[Row]) -> None:
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event

        self.close()
        # A full disk costs this picture, never the run; the next start draws it again.
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
    """A run of Weights & Biases, whose id stays in the run's folder.

    Of a step that is made twice (after a kill, or a return) it keeps the first row.
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
        file = self._folder / "wandb-id"
        if not file.is_file():
            file.write_text(uuid.uuid4().hex, encoding="utf-8")
        return file.read_text(encoding="utf-8")


def _event(row: Row) -> bytes:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    numbers = {key: value for key, value in row.items() if isinstance(value, float) and key != "time"}
    values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
    return Event(wall_time=row.get("time", 0.0), step=row["step"], summary=Summary(value=values)).SerializeToString()
