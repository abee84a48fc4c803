"""When the state of a run goes to the disk, and what goes there beside it."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from ladder_jax.checkpoint import Failure, Store, steps
from ladder_jax.errors import RunFailed
from ladder_jax.parallel import Agreement
from ladder_jax.retrain import Fixed, Plan
from ladder_jax.train import resume
from ladder_jax.train.folder import CONFIG
from ladder_jax.train.goodput import Account
from ladder_jax.train.metrics import Metrics
from ladder_jax.train.policy import Judge
from ladder_jax.train.step import TrainState


@dataclasses.dataclass(frozen=True)
class Position:
    """What a checkpoint holds beside the arrays and the configuration, as its item `data`.

    step: the last one made, so the next batch is that of step + 1; fingerprint: of the training data; skipped: steps
    whose batches changed nothing; mean, count: of the recent losses (`TrainState`); account: of time (`goodput`);
    sources: the checkpoints that the run took weights from (`retrain.sources`).
    """

    step: int
    fingerprint: str
    skipped: list[int]
    mean: float
    count: int
    account: dict[str, Any]
    sources: dict[str, Any]


class Keeper:
    """Saves a run's state after a step, and knows which is the newest that is safe. All waiting counts as saving."""

    def __init__(
        self,
        store: Store,
        *,
        fingerprint: str,
        metrics: Metrics,
        judge: Judge,
        account: Account,
        plan: Plan,
        noted: dict[str, Any],
        agreement: Agreement,
        describe: Callable[[], None],
    ):
        self._store, self._fingerprint = store, fingerprint
        self._metrics, self._judge, self._account = metrics, judge, account
        self._plan, self._noted, self._agreement = plan, noted, agreement
        self._describe = describe

    def save(self, step: int, state: TrainState, fixed: Fixed, *, validation: float | None) -> None:
        """Start to save; `failure()` tells, later, if that went wrong."""
        with self._account.time("saving"):
            self._metrics.sync()
            if not (self._store.folder.parent / CONFIG).exists():  # somebody has removed the run's folder
                with contextlib.suppress(OSError):  # the save meets the same disk, and tells
                    self._describe()
            position = Position(
                step=step,
                fingerprint=self._fingerprint,
                skipped=sorted(self._judge.left_out),
                mean=float(state.mean_loss),
                count=int(state.good_steps),
                account=self._account.as_dict(),
                sources=self._noted,
            )
            params, moments = resume.kept(state, fixed, plan=self._plan)
            self._store.save(
                step,
                params=params,
                optimizer=moments,
                data=dataclasses.asdict(position),
                validation_loss=validation,
            )
        self._judge.saved()

    def make_sure(self, step: int, state: TrainState, fixed: Fixed, *, validation: float | None) -> None:
        """Return when the state after `step`, the newest, is on the disk; RunFailed where it cannot get there."""
        if step > self.newest():
            self._store.failure()  # it is tried once more
            self.save(step, state, fixed, validation=validation)
        self.finish()

    def finish(self) -> None:
        """Wait for what is being saved. Raises RunFailed where that fails."""
        self.wait()
        if failure := self._store.failure():
            raise RunFailed(f"{failure}; the same command goes on from there")

    def failure(self) -> Failure | None:
        """What went wrong since this was last asked, without waiting."""
        return self._store.failure()

    def newest(self) -> int:
        """The step of the newest checkpoint, once all are written; 0 for none. All processes ask together."""
        self.wait()
        return self._agreement.decided("the newest checkpoint", lambda: max(steps(self._store.folder), default=0))

    def wait(self) -> None:
        with self._account.time("saving"):
            self._store.wait()
