"""The steps of one process: dispatch, read, log, evaluate, save; and the return to a checkpoint.

Step s + 1 is dispatched before the metrics of step s are read, so that the devices never wait for the host. Only where
the state after a step is needed itself, to evaluate or to save, its metrics are read at once.
"""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np

from ladder_jax.config import RunConfig
from ladder_jax.errors import RunFailed, Stopped, UserError
from ladder_jax.parallel import Agreement
from ladder_jax.progress import progress
from ladder_jax.retrain import Fixed, Plan, Sources
from ladder_jax.train import policy, resume
from ladder_jax.train import speed as speeds
from ladder_jax.train import step as steps
from ladder_jax.train.ahead import read_ahead
from ladder_jax.train.evaluation import Evaluation
from ladder_jax.train.feed import Feed
from ladder_jax.train.goodput import Account
from ladder_jax.train.keeper import Keeper
from ladder_jax.train.metrics import Metrics
from ladder_jax.train.policy import Judge, RollBack
from ladder_jax.train.profile import Profile
from ladder_jax.train.signals import Asked
from ladder_jax.train.speed import Speed
from ladder_jax.train.step import BAD, TrainState


@dataclasses.dataclass(kw_only=True)
class Session:
    """What the steps work on. `state` is the newest, `fixed` what steps never change.

    validation: the held-out loss after it, if it was measured.
    """

    config: RunConfig
    plan: Plan
    sources: Sources
    folder: pathlib.Path
    state: TrainState
    fixed: Fixed
    feed: Feed
    evaluation: Evaluation
    judge: Judge
    keeper: Keeper
    agreement: Agreement
    metrics: Metrics
    speed: Speed
    profile: Profile
    account: Account
    asked: Asked
    say: Callable[[str], None]
    beat: Callable[[str], None]
    validation: float | None = None

    def __post_init__(self):
        self._step_fn = None

    def run(self) -> None:
        """All remaining steps. Raises Stopped after a signal, RunFailed for what no step can follow."""
        first, last = int(self.state.step), self.config.train.steps
        while first < last:
            try:
                self._compile()
                self._make_up(first)
                with self.account.time("steps"):
                    return self._steps(first, last)
            except RollBack as bad:
                first = self._go_back(bad)

    def _steps(self, first: int, last: int) -> None:
        train, pending = self.config.train, None
        shown = progress(last, done=first, label="step {done}/{total}", say=self.say)
        with (
            shown if jax.process_index() == 0 else contextlib.nullcontext(lambda done, text: None) as self._update,
            contextlib.closing(self.profile),
            read_ahead(self.feed.read, first=first, last=last) as batches,
        ):
            for step in range(first + 1, last + 1):
                self.beat(f"step {step}")
                if self.asked.at(step - 1):
                    self._settle(pending)
                    self._end(step - 1)
                try:
                    with self.account.time("data"):
                        batch = self.feed.place(next(batches))
                except (OSError, UserError) as error:
                    why = f"the batch of step {step} cannot be read: {error}"
                    if jax.process_count() > 1:  # the others are in that step, which never ends, and cannot save
                        whose = f"process {jax.process_index()} of {jax.process_count()}"
                        raise RunFailed(f"{why} ({whose}); the same command goes on from the last checkpoint") from None
                    self._settle(pending)
                    raise RunFailed(f"{why}; {self._keep(step - 1)}") from None
                self.profile.before(step, waited_for=self.state)
                if step in self.judge.left_out:
                    self.state, metrics = policy.pass_over(self.state), None
                else:
                    self.state, metrics = self._step_fn(self.state, batch, self.fixed)
                self._settle(pending)
                pending = step, metrics
                if self.profile.after(step, waited_for=metrics):
                    self.say(f"profile of the steps {self.profile} in {self.folder / 'profile'}")
                if _due(step, train.checkpoint_every, last) or _due(step, train.evaluate_every, last):
                    self._settle(pending)
                    pending = None
        self.keeper.finish()

    def _settle(self, pending: tuple[int, dict[str, jax.Array] | None] | None) -> None:
        """Read the metrics of a step, which waits for it, and do what is due after it."""
        if pending is None:
            return
        (step, metrics), train = pending, self.config.train
        read = {name: value.item() for name, value in jax.device_get(metrics or {"loss": np.float32(np.nan)}).items()}
        if read.pop(BAD, False):
            self.judge.bad(step, read, saved=self.keeper.newest())
        elif metrics:
            self.judge.good()
        self.beat(f"after step {step}")
        evaluated = _due(step, train.evaluate_every, train.steps)
        self.validation = self.evaluation(self.state.params, self.fixed) if evaluated else None
        note = {"validation_loss": self.validation} if self.validation is not None else {}
        if reason := self.judge.left_out.get(step):
            note["event"] = f"batch left out: {reason}"
            self.say(f"step {step}: {note['event']}")
        if note or evaluated or _due(step, train.log_every, train.steps):
            row = {"step": step, "loss": read.pop("loss"), **self.speed.since_last(step), **read, "time": time.time()}
            row = self.metrics.add({**row, **note})
            self._update(step, speeds.as_text(row))
        if _due(step, train.checkpoint_every, train.steps):
            self.keeper.wait()  # for the save before: its failure would be lost behind this one's
            self._tell_failure(step)
            self.keeper.save(step, self.state, self.fixed, validation=self.validation)
        if step < train.steps:  # that of the last step ends the run, in `_steps`
            self._tell_failure(step)

    def _tell_failure(self, step: int) -> None:
        if failure := self.keeper.failure():
            self.say(f"step {step}: {failure}; training goes on, and the next checkpoint is tried as usual")

    def _keep(self, step: int) -> str:
        """Save the state after `step`, which is the newest; says so."""
        if step:
            self.keeper.make_sure(step, self.state, self.fixed, validation=self.validation)
        return f"step {step} is saved, and the same command goes on from there" if step else "no step was made yet"

    def _end(self, step: int) -> None:
        signum = self.asked.which
        raise Stopped(f"{signum.name}: {self._keep(step)} ({self.folder})", signum=signum)

    def finish(self) -> float:
        """The held-out loss after the last step; Stopped if a signal came before it was measured."""
        if self.validation is None:
            self.validation = self.evaluation(self.state.params, self.fixed)
        if self.validation is None:
            self._end(self.config.train.steps)
        return self.validation

    def _compile(self) -> None:
        if self._step_fn is not None:
            return
        train = self.config.train
        self.say("compiling the training step")
        with self.account.time("compile"):
            step = steps.train_step(self.plan.definition, config=train, plan=self.plan)
            self._step_fn = step.compile(self.state, self.feed.abstract(), self.fixed)

    def _make_up(self, first: int) -> None:
        """The evaluation that a signal cut short, just before the checkpoint of step `first`."""
        if first and _due(first, self.config.train.evaluate_every, 0):
            row = self.agreement.decided("the evaluation to make up for", lambda: self.metrics.without_loss(first))
            if row and (loss := self.evaluation(self.state.params, self.fixed)) is not None:
                self.metrics.rewind(first - 1, then={**row, "validation_loss": loss})
        self.speed.restart(first)

    def _go_back(self, bad: RollBack) -> int:
        self.keeper.wait()
        known = dict(config=self.config.train, plan=self.plan, sources=self.sources, agreement=self.agreement)
        found = dict(config=self.config, say=self.say, agreement=self.agreement)
        checkpoint = resume.newest(self.folder / "checkpoints", **found)
        step = checkpoint.step if checkpoint else 0
        if checkpoint:
            self.state, self.fixed = resume.restored(checkpoint, **known)
            self.account.go_back(checkpoint.data.get("account"), restarts=0)
        else:
            self.account.go_back(None, restarts=0)
            self.state, self.fixed = resume.begun(**known)
        left_out = self.judge.returned(bad, to=step)
        self.metrics.rewind(step)
        self.say(
            f"step {bad.step}: {bad}: back to step {step}, and on without the batches of the steps"
            f" {left_out[0]} to {left_out[-1]}"
        )
        return step


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
