"""The steps of one process: dispatch, read, log, evaluate, save; and the return to a checkpoint.

Step s + 1 is dispatched before the metrics of step s are read, so that the devices never wait for the host. Only where
the state after a step is needed itself, to evaluate or to save, its metrics are read at once.
"""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np

from ladder_jax.checkpoint import Store, open_checkpoint, steps
from ladder_jax.config import RunConfig
from ladder_jax.errors import RunFailed, Stopped, UserError
from ladder_jax.nn import Definition
from ladder_jax.progress import progress
from ladder_jax.train import optimizer, policy, resume
from ladder_jax.train import speed as speeds
from ladder_jax.train.goodput import Account
from ladder_jax.train.metrics import Metrics
from ladder_jax.train.policy import BAD, Guarded, Judge, RollBack
from ladder_jax.train.profile import Profile
from ladder_jax.train.signals import Asked
from ladder_jax.train.speed import Speed
from ladder_jax.train.step import mean_loss

READ_AHEAD = 2  # batches


@dataclasses.dataclass(kw_only=True)
class Session:
    """What the steps work on. `state` is the newest; `validation` the held-out loss after it, if it was measured."""

    config: RunConfig
    definition: Definition
    folder: pathlib.Path
    state: Guarded
    dataset: grain.MapDataset
    fingerprint: str
    held_out: list[np.ndarray]
    judge: Judge
    store: Store
    metrics: Metrics
    speed: Speed
    profile: Profile
    account: Account
    asked: Asked
    say: Callable[[str], None]
    validation: float | None = None

    def __post_init__(self):
        self._step_fn = self._loss_fn = None
        self._saved = int(self.state.train.step)

    def run(self) -> None:
        """All remaining steps. Raises Stopped after a signal, RunFailed for what no step can follow."""
        first, last = int(self.state.train.step), self.config.train.steps
        while first < last:
            try:
                self._compile()
                self._make_up(first)
                with self.account.time("steps"):
                    return self._steps(first, last)
            except RollBack as bad:
                first = self._go_back(bad)

    def evaluate(self) -> float | None:
        """The mean held-out loss, nats a token; None if a signal asked for the end meanwhile."""
        sharding, params = self.definition.layout.sharding("BT"), self.state.train.params
        if self._loss_fn is None:
            with self.account.time("compile"):
                example = jax.ShapeDtypeStruct(self.held_out[0].shape, np.int32, sharding=sharding)
                self._loss_fn = mean_loss(self.definition, loop=self.config.train.loop).compile(params, example)
        losses = []
        with self.account.time("evaluation"):
            for batch in self.held_out:
                if self.asked.now:
                    return None
                losses.append(float(self._loss_fn(params, jax.device_put(batch, sharding))))
        return float(np.mean(losses))

    def _steps(self, first: int, last: int) -> None:
        train, pending = self.config.train, None
        shown = progress(last, done=first, label="step {done}/{total}", say=self.say)
        with (
            shown if jax.process_index() == 0 else contextlib.nullcontext(lambda done, text: None) as self._update,
            contextlib.closing(self.profile),
            _batches(self.dataset, first=first) as batches,
        ):
            for step in range(first + 1, last + 1):
                if self.asked.at(step - 1):
                    self._settle(pending)
                    self._end(step - 1)
                try:
                    with self.account.time("data"):
                        tokens = jax.device_put(next(batches), self.definition.layout.sharding("BT"))
                except (OSError, UserError) as error:
                    self._settle(pending)
                    raise RunFailed(
                        f"the batch of step {step} cannot be read: {error}; {self._keep(step - 1)}"
                    ) from None
                self.profile.before(step, waited_for=self.state)
                if step in self.judge.left_out:
                    self.state, metrics = policy.pass_over(self.state), None
                else:
                    self.state, metrics = self._step_fn(self.state, tokens)
                self._settle(pending)
                pending = step, metrics
                if self.profile.after(step, waited_for=metrics):
                    self.say(f"profile of the steps {self.profile} in {self.folder / 'profile'}")
                if _due(step, train.checkpoint_every, last) or _due(step, train.evaluate_every, last):
                    self._settle(pending)
                    pending = None
        with self.account.time("saving"):
            self.store.wait()
        if failure := self.store.failure():
            raise RunFailed(f"{failure}; the same command goes on from there")

    def _settle(self, pending: tuple[int, dict[str, jax.Array] | None] | None) -> None:
        """Read the metrics of a step, which waits for it, and do what is due after it."""
        if pending is None:
            return
        (step, metrics), train = pending, self.config.train
        read = {name: np.asarray(value).item() for name, value in (metrics or {"loss": np.nan}).items()}
        if read.pop(BAD, False):
            with self.account.time("saving"):
                self.store.wait()
            self.judge.bad(step, read, saved=self._newest())
        elif metrics:
            self.judge.good()
        self.validation = self.evaluate() if _due(step, train.evaluate_every, train.steps) else None
        note = {"validation_loss": self.validation} if self.validation is not None else {}
        if reason := self.judge.left_out.get(step):
            note["event"] = f"batch left out: {reason}"
            self.say(f"step {step}: {note['event']}")
        if note or _due(step, train.log_every, train.steps):
            row = {"step": step, "loss": read.pop("loss"), **self.speed.since_last(step), **read, "time": time.time()}
            row = self.metrics.add({**row, **note})
            self._update(step, speeds.as_text(row))
        if _due(step, train.checkpoint_every, train.steps):
            self._save(step)
        # That of the last step ends the run, in `_steps`.
        if step < train.steps and (failure := self.store.failure()):
            self.say(f"step {step}: {failure}; training goes on, and the next checkpoint is tried as usual")

    def _save(self, step: int) -> None:
        with self.account.time("saving"):
            self.metrics.sync()
            position = resume.Position(
                step=step,
                fingerprint=self.fingerprint,
                skipped=sorted(self.judge.left_out),
                mean=float(self.state.mean),
                count=int(self.state.count),
                account=self.account.as_dict(),
            )
            self.store.save(
                step,
                params=self.state.train.params,
                optimizer=optimizer.to_dict(self.state.train.optimizer),
                data=dataclasses.asdict(position),
                validation_loss=self.validation,
            )
        self._saved = step
        self.judge.saved()

    def _keep(self, step: int) -> str:
        """Make sure that the state after `step`, which is the newest, is on the disk; says where it is."""
        if step > self._saved:
            self.validation = None
            self._save(step)
        with self.account.time("saving"):
            self.store.wait()
        if failure := self.store.failure():
            raise RunFailed(f"after step {step}: {failure}")
        return f"step {step} is saved, and the same command goes on from there" if step else "no step was made yet"

    def _end(self, step: int) -> None:
        signum = self.asked.which
        raise Stopped(f"{signum.name}: {self._keep(step)} ({self.folder})", signum=signum)

    def finish(self) -> float:
        """The held-out loss after the last step; Stopped if a signal came before it was measured."""
        if self.validation is None:
            self.validation = self.evaluate()
        if self.validation is None:
            self._end(self._saved)
        return self.validation

    def _compile(self) -> None:
        if self._step_fn is not None:
            return
        train = self.config.train
        self.say("compiling the training step")
        with self.account.time("compile"):
            sharding = self.definition.layout.sharding("BT")
            example = jax.ShapeDtypeStruct((train.batch, train.sequence + 1), np.int32, sharding=sharding)
            self._step_fn = policy.guarded_step(self.definition, config=train).compile(self.state, example)

    def _make_up(self, first: int) -> None:
        """The evaluation that a signal cut short, just before the checkpoint of step `first`."""
        rows = self.metrics.rows
        if first and _due(first, self.config.train.evaluate_every, 0) and rows and rows[-1]["step"] == first:
            if "validation_loss" not in rows[-1] and (loss := self.evaluate()) is not None:
                self.metrics.rewind(first - 1)
                self.metrics.add({**rows[-1], "validation_loss": loss})
        self.speed.restart(first)

    def _go_back(self, bad: RollBack) -> int:
        step, train = self._newest(), self.config.train
        if step:
            checkpoint = open_checkpoint(self.folder / "checkpoints" / str(step))
            self.state = resume.restored(checkpoint, config=train, definition=self.definition)
            self.account.go_back(checkpoint.data["account"], restarts=0)
        else:
            self.state = resume.begun(config=train, definition=self.definition)
        left_out = self.judge.returned(bad, to=step)
        self._saved = step
        self.metrics.rewind(step)
        self.say(
            f"step {bad.step}: {bad}: back to step {step}, and on without the batches of the steps"
            f" {left_out[0]} to {left_out[-1]}"
        )
        return step

    def _newest(self) -> int:
        return max(steps(self.folder / "checkpoints"), default=0)


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


@contextlib.contextmanager
def _batches(dataset: grain.MapDataset, *, first: int) -> Iterator[Any]:
    """The batches of the steps after `first`, read ahead by a thread; what goes wrong there is raised here."""
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD)
    batches = iter(dataset[first:].to_iter_dataset(options))
    try:
        yield batches
    finally:
        batches.close()
