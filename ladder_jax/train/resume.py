"""Where a run goes on: its newest checkpoint, if that is whole and belongs to the same data."""

import pathlib
from collections.abc import Callable

import jax
import numpy as np

from ladder_jax.checkpoint import Checkpoint, Damaged, open_checkpoint, steps
from ladder_jax.config import OnDamaged, RunConfig, TrainConfig
from ladder_jax.errors import UserError
from ladder_jax.nn import Definition
from ladder_jax.train import optimizer, policy
from ladder_jax.train.policy import Guarded
from ladder_jax.train.step import TrainState, abstract_state, initial_state


def newest(folder: pathlib.Path, *, config: RunConfig, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint below `folder`, every file of it compared with its manifest; None if there is none.

    With run.on_damaged=previous a damaged one is put aside, as `<step>.damaged`. Raises Damaged otherwise, and where
    no whole one is left.
    """
    found = steps(folder)
    for step in reversed(found):
        path = folder / str(step)
        try:
            checkpoint = open_checkpoint(path).check()
            if not checkpoint.listed:
                say(
                    f"checkpoint {path} is of an older version and has no manifest: a changed bit in it would go unseen"
                )
            return checkpoint
        except Damaged as damaged:
            if config.run.on_damaged is OnDamaged.STOP:
                raise Damaged(f"{damaged} (run.on_damaged=previous puts it aside and goes on from there)") from None
            if step == found[0]:
                raise Damaged(f"{damaged}, and there is no whole one before it") from None
            say(f"{damaged}: put aside as {path.name}.damaged")
            if jax.process_index() == 0:
                path.rename(path.with_name(f"{path.name}.damaged"))
    return None


def restored(checkpoint: Checkpoint, *, config: TrainConfig, definition: Definition) -> Guarded:
    """The state that `checkpoint` holds, on `definition`'s mesh."""
    shapes = abstract_state(definition, config=config)
    moments = checkpoint.optimizer(optimizer.to_dict(shapes.optimizer))
    state = TrainState(
        checkpoint.params(definition),
        optimizer.from_dict(moments, like=shapes.optimizer),
        jax.device_put(np.int32(checkpoint.step), shapes.step.sharding),
    )
    return policy.guard(state, mean=checkpoint.data.get("mean", 0.0), count=checkpoint.data.get("count", 0))


def begun(*, config: TrainConfig, definition: Definition) -> Guarded:
    """The state before the first step."""
    return policy.guard(initial_state(definition, config=config))


def check_data(checkpoint: Checkpoint, *, path: str, fingerprint: str) -> None:
    """Raises UserError where the run was trained on other data than there is now."""
    before = checkpoint.data.get("fingerprint", fingerprint)
    if before != fingerprint:
        raise UserError(
            f"data.path={path!r} has changed since step {checkpoint.step} (its fingerprint was {before}, now"
            f" {fingerprint}), and its batches would be others: bring it back, or choose another run.dir"
        )
