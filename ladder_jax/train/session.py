"""The training loop of one process: dispatch, read, log, evaluate, save; and what follows a bad
step, the return to a checkpoint among it.

Step s + 1 is dispatched before the metrics of step s are read, so that the devices never wait for
the host. Only where the state after a step is needed itself, to evaluate or to save, its metrics
are read at once.

A step is bad where its loss or gradient is not finite, or its loss jumps. The compiled step
(step.py) keeps the old state of a bad step whatever `train.on_bad_step` says, so neither parameters
nor moments are ever damaged. Only the step's number goes on, so that the batch of step s stays a
function of the seed and s. When the host reads the metrics, one step later,

    stop      ends the run; the last checkpoint is from before
    skip      says so, and goes on
    rollback  returns to the last checkpoint, and leaves out the batches up to the bad one ("batches
              that were seen before and during the spike": PaLM, arXiv 2204.02311, section 5.1)

The mean that a jump is measured against is part of the state, and saved with it: a resumed run
decides alike.
"""

import contextlib
import dataclasses
import functools
import math
import time

import jax
import numpy as np

from ladder_jax.checkpoint import Store
from ladder_jax.config import Json, OnBadStep, TrainConfig
from ladder_jax.data.dataset import DataLoader, read_ahead
from ladder_jax.data.packing import Batch
from ladder_jax.errors import RunFailed, Stopped, UserError
from ladder_jax.nn import Params
from ladder_jax.terminal import progress
from ladder_jax.train import checkpoints, step as steps, timing
from ladder_jax.train.folder import PROFILE, RunContext
from ladder_jax.train.gradients import TrainingTask, held_out_loss
from ladder_jax.train.metrics import Metrics
from ladder_jax.train.step import BAD, TrainState
from ladder_jax.train.timing import Profiler, Throughput

# a step and its metrics, still on the devices; None: left out
Dispatched = tuple[int, steps.Metrics | None]
# the reason of a batch left out before: a checkpoint holds its step alone
RESTORED = "known from the checkpoint"


class RollBack(Exception):
    """Return to the last checkpoint, because of this step."""

    def __init__(self, reason: str, *, step: int):
        super().__init__(reason)
        self.step = step


@dataclasses.dataclass
class BadStepPolicy:
    """What `train.on_bad_step` does at bad steps. left_out: the steps whose batch changes nothing,
    with the reason.
    """

    config: TrainConfig
    left_out: dict[int, str] = dataclasses.field(default_factory=dict)
    _in_a_row: int = 0
    _returns: int = 0

    def good(self) -> None:
        self._in_a_row = 0

    def bad(self, step: int, metrics: Json) -> None:
        """Returns if training goes on without this batch; raises RunFailed or RollBack.

        metrics: the bad step's, on the host.
        """
        limit = self.config.max_bad_steps
        reason = _reason(metrics, config=self.config)
        match self.config.on_bad_step:
            case OnBadStep.SKIP:
                self._in_a_row += 1
                if self._in_a_row <= limit:
                    self.left_out[step] = reason
                    return
                why = f" after {self._in_a_row} bad steps in a row"
            case OnBadStep.ROLLBACK:
                if self._returns < limit:
                    raise RollBack(reason, step=step)
                why = f" after {self._returns} returns"
            case OnBadStep.STOP:
                why = "; with train.on_bad_step=skip or rollback the same command goes on without such batches"
        raise RunFailed(f"step {step}: {reason}: stopped{why}")

    def returned(self, bad: RollBack, *, to: int) -> range:
        """The steps up to the bad one, which are left out now that the run is back at the
        checkpoint of step `to`.
        """
        before = max(to, bad.step - self.config.rollback_batches)
        steps = range(before + 1, bad.step + 1)
        self.left_out |= dict.fromkeys(steps, f"step {bad.step}: {bad}")
        self._returns += 1
        return steps

    def saved(self) -> None:
        """Another checkpoint was saved, to which the run may return again."""
        self._returns = 0


@dataclasses.dataclass(kw_only=True)
class Session:
    """A run's steps. state: after the newest one; frozen: the parameters that no step changes.

    held_out: the batches of the held-out loss, the same every time; validation: that of `state`, if
        it was measured. about: what each checkpoint says of the run's data and weights.
    """

    context: RunContext
    task: TrainingTask
    state: TrainState
    frozen: Params
    loader: DataLoader
    held_out: list[np.ndarray | Batch]
    policy: BadStepPolicy
    store: Store
    about: Json
    metrics: Metrics
    throughput: Throughput
    profiler: Profiler
    validation: float | None = None
    _saved: int | None = None  # the step of the newest save, unless it has failed

    def run(self) -> None:
        """All remaining steps. Raises Stopped after a signal, RunFailed where training cannot go
        on.
        """
        first = int(self.state.step)
        last = self.context.config.train.steps
        self._saved = first  # resumed from there
        while first < last:
            try:
                self.throughput.restart(first)
                with self.context.account.time("steps"):
                    return self._steps(first, last)
            except RollBack as bad:
                first = self._roll_back(bad)

    @functools.cached_property
    def _compiled_step(self) -> jax.stages.Compiled:
        context = self.context
        context.say("compiling the training step")
        with context.account.time("compile"):
            step = steps.train_step(
                self.task.definition, config=context.config.train, task=self.task
            )
            return step.compile(self.state, self.loader.abstract(), self.frozen)

    def _steps(self, first: int, last: int) -> None:
        context = self.context
        train = context.config.train
        make_step = self._compiled_step
        label = "step {done}/{total}" if jax.process_index() == 0 else None
        pending: Dispatched | None = None
        with (
            progress(last, done=first, label=label, say=context.say) as self._update,
            contextlib.closing(self.profiler),
            read_ahead(self.loader.read, first=first, last=last) as batches,
        ):
            for step in range(first + 1, last + 1):
                context.heartbeat(f"step {step}")
                if context.stop.asked():
                    self._settle(pending)
                    signum = context.stop.signum
                    saved = self._save_now(step - 1)
                    raise Stopped(f"{signum.name}: {saved} ({context.folder})", signum=signum)
                try:
                    with context.account.time("data"):
                        batch = self.loader.place(next(batches))
                except (OSError, UserError) as error:
                    self._data_failed(step, error, pending)
                self.profiler.before(step, pending=self.state)
                if step in self.policy.left_out:
                    # its batch is left out
                    self.state = dataclasses.replace(self.state, step=self.state.step + 1)
                    metrics = None
                else:
                    self.state, metrics = make_step(self.state, batch, self.frozen)
                self._settle(pending)
                pending = step, metrics
                if self.profiler.after(step, pending=metrics):
                    context.say(f"profile in {context.folder / PROFILE}")
                if _due(step, train.checkpoint_every, last) or _due(
                    step, train.evaluate_every, last
                ):
                    self._settle(pending)
                    pending = None
        self._await_save()

    def _settle(self, pending: Dispatched | None) -> None:
        """Read the metrics of a step, which waits for it; log, evaluate and save where that is
        due.
        """
        if pending is None:
            return
        step, metrics = pending
        context = self.context
        train = context.config.train
        last = train.steps
        read = {
            name: value.item()
            for name, value in jax.device_get(metrics or {"loss": np.float32(np.nan)}).items()
        }
        if read.pop(BAD, False):
            self.policy.bad(step, read)
        elif metrics:
            self.policy.good()
        else:
            self.throughput.left_out()
        context.heartbeat(f"after step {step}")
        note = {}
        if _due(step, train.evaluate_every, last):
            self.validation = self._evaluate()
            note["validation_loss"] = self.validation
        else:
            self.validation = None
        if reason := self.policy.left_out.get(step):
            event = f"batch left out: {reason}"
            note["event"] = event
            context.say(f"step {step}: {event}")
        if note or _due(step, train.log_every, last):
            speed = self.throughput.since_last(step)
            loss = read.pop("loss")
            row = {"step": step, "loss": loss, **speed, **read, "time": time.time()}
            row = self.metrics.add(row | note)
            self._update(step, timing.row_text(row))
        if _due(step, train.checkpoint_every, last):
            self._wait()  # for the save before: its failure would be lost behind this one's
            self._report_failure(step)
            self._save(step)
        if step < last:  # a failure after the last step ends the run, in `_steps`
            self._report_failure(step)

    def _save(self, step: int) -> None:
        with self.context.account.time("saving"):
            self.metrics.sync()
            checkpoints.save(
                self.store,
                self.state,
                self.frozen,
                context=self.context,
                task=self.task,
                validation=self.validation,
                skipped=sorted(self.policy.left_out),  # steps whose batches changed nothing
                **self.about,
            )
        self._saved = step
        self.policy.saved()

    def _wait(self) -> None:
        with self.context.account.time("saving"):
            self.store.wait()

    def _await_save(self) -> None:
        """Wait until the last save is on the disk. Raises RunFailed where that fails."""
        self._wait()
        if failure := self.store.failure():
            raise RunFailed(f"{failure}; the same command goes on from there")

    def _report_failure(self, step: int) -> None:
        if failure := self.store.failure():
            self._saved = None
            self.context.say(
                f"step {step}: {failure}; training goes on, and the next checkpoint is tried as usual"
            )

    def _data_failed(self, step: int, error: Exception, pending: Dispatched | None) -> None:
        why = f"the batch of step {step} cannot be read: {error}"
        # the others wait in that step for this process, and cannot save
        if jax.process_count() > 1:
            process = f"process {jax.process_index()} of {jax.process_count()}"
            raise RunFailed(
                f"{why} ({process}); the same command goes on from the last checkpoint"
            ) from None
        self._settle(pending)
        raise RunFailed(f"{why}; {self._save_now(step - 1)}") from None

    def _save_now(self, step: int) -> str:
        """Save the state after `step`, the newest, and wait until it is on the disk; returns a
        clause that says so.
        """
        if not step:
            return "no step was made yet"
        self._wait()
        if self.store.failure() or step != self._saved:
            self._save(step)
        self._await_save()
        return f"step {step} is saved, and the same command goes on from there"

    def finish(self) -> float:
        """The held-out loss after the last step."""
        return self._evaluate() if self.validation is None else self.validation

    @functools.cached_property
    def _compiled_loss(self) -> jax.stages.Compiled:
        train = self.context.config.train
        with self.context.account.time("compile"):
            loss = held_out_loss(self.task, loop=train.loop, loss_chunk=train.loss_chunk)
            batch = self.loader.place(self.held_out[0])
            return loss.compile(self.state.params, self.frozen, batch)

    def _evaluate(self) -> float:
        """The held-out loss, the mean in nats a token."""
        losses = []
        weights = []
        with self.context.account.time("evaluation"):
            for batch in self.held_out:
                mean = self._compiled_loss(self.state.params, self.frozen, self.loader.place(batch))
                losses.append(float(mean))
                # padding is not predicted
                weights.append(batch.predicted.sum() if isinstance(batch, Batch) else 1)
        return float(np.average(losses, weights=weights))

    def _roll_back(self, bad: RollBack) -> int:
        self._wait()
        context = self.context
        checkpoint = checkpoints.newest(context)
        self.state, self.frozen = checkpoints.restore(checkpoint, context=context, task=self.task)
        account = checkpoint and checkpoint.data.get("account")
        context.account.go_back(account)
        step = int(self.state.step)
        left_out = self.policy.returned(bad, to=step)
        self.metrics.rewind(step)
        context.say(
            f"step {bad.step}: {bad}: back to step {step}, and on without the batches of the steps"
            f" {left_out[0]} to {left_out[-1]}"
        )
        return step


def _due(step: int, every: int, last: int) -> bool:
    return step == last or every > 0 and step % every == 0


def _reason(metrics: Json, *, config: TrainConfig) -> str:
    for name in ("loss", "gradient_norm"):
        value = metrics[name]
        if not math.isfinite(value):
            return f"the {name.replace('_', ' ')} is {value}"
    return f"the loss jumped to {metrics['loss']:.3f}, over {config.spike_factor:g} times its recent mean"
