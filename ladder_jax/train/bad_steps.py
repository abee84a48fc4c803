"""Bad steps, whose loss or gradient is not finite, or whose loss jumps: detected in the compiled
step, handled here.

The compiled step (step.py) keeps the old state of a bad step whatever `train.on_bad_step` says, so
neither parameters nor moments are ever damaged, and no device waits for the host. Only the step's
number goes on, so that the batch of step s stays a function of the seed and s. The host reads the
metrics one step later, and

    stop      ends the run; the last checkpoint is from before
    skip      says so, and goes on
    rollback  returns to the last checkpoint, and leaves out the batches up to the bad one ("batches
              that were seen before and during the spike": PaLM, arXiv 2204.02311, section 5.1)

The mean that a jump is measured against is part of the state, and saved with it: a resumed run
decides alike.
"""

import dataclasses
import math
from typing import Any

from ladder_jax.config import OnBadStep, TrainConfig
from ladder_jax.errors import RunFailed
from ladder_jax.train.step import TrainState

# the reason of a batch left out before: a checkpoint holds its step alone
RESTORED = "known from the checkpoint"


class RollBack(Exception):
    """Return to the last checkpoint, because of this step."""

    def __init__(self, reason: str, *, step: int):
        super().__init__(reason)
        self.step = step


def pass_over(state: TrainState) -> TrainState:
    """The state after a step whose batch is left out."""
    return dataclasses.replace(state, step=state.step + 1)


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

    def bad(self, step: int, metrics: dict[str, Any], *, saved: int) -> None:
        """Returns if training goes on without this batch; raises RunFailed or RollBack.

        metrics: the bad step's, on the host; saved: the step of the last checkpoint, 0 for none.
        """
        config, reason = self.config, _reason(metrics, config=self.config)
        newest = (
            f"the newest checkpoint is that of step {saved}"
            if saved
            else "there is no checkpoint yet"
        )
        if config.on_bad_step is OnBadStep.STOP:
            raise RunFailed(
                f"step {step}: {reason}: stopped; {newest}."
                " With train.on_bad_step=skip or rollback the same command goes on without such batches"
            )
        if config.on_bad_step is OnBadStep.ROLLBACK:
            if self._returns == config.max_bad_steps:
                raise RunFailed(
                    f"step {step}: {reason}: stopped after {self._returns} returns; {newest}"
                )
            raise RollBack(reason, step=step)
        self._in_a_row += 1
        if self._in_a_row > config.max_bad_steps:
            raise RunFailed(
                f"step {step}: {reason}: stopped after {self._in_a_row} bad steps in a row; {newest}"
            )
        self.left_out[step] = reason

    def returned(self, bad: RollBack, *, to: int) -> range:
        """The steps up to the bad one, which are left out now that the run is back at the
        checkpoint of step `to`.
        """
        steps = range(max(to, bad.step - self.config.rollback_batches) + 1, bad.step + 1)
        self.left_out |= dict.fromkeys(steps, f"step {bad.step}: {bad}")
        self._returns += 1
        return steps

    def saved(self) -> None:
        """Another checkpoint was saved, to which the run may return again."""
        self._returns = 0


def _reason(metrics: dict[str, Any], *, config: TrainConfig) -> str:
    for name in ("loss", "gradient_norm"):
        if not math.isfinite(metrics[name]):
            return f"the {name.replace('_', ' ')} is {metrics[name]}"
    return f"the loss jumped to {metrics['loss']:.3f}, over {config.spike_factor:g} times its recent mean"
