"""Where a run goes on: its newest checkpoint, if that is whole and belongs to the same data."""

import pathlib
from collections.abc import Callable

import jax
import numpy as np

from ladder_jax import nn
from ladder_jax.checkpoint import Checkpoint, Damaged, open_checkpoint, steps
from ladder_jax.config import OnDamaged, RunConfig, TrainConfig
from ladder_jax.errors import UserError
from ladder_jax.nn import Params
from ladder_jax.retrain import ADAPTERS, Fixed, Plan, Sources
from ladder_jax.train import optimizer
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


def restored(checkpoint: Checkpoint, *, config: TrainConfig, plan: Plan, sources: Sources) -> tuple[TrainState, Fixed]:
    """The state that `checkpoint` holds, on the plan's mesh, and what is fixed beside it."""
    shapes = abstract_state(plan.definition, config=config, plan=plan)
    stored = checkpoint.optimizer(optimizer.to_dict(shapes.optimizer) | _beside(plan, plan.abstract))
    # Of low-rank factors the checkpoint holds the sum with what they are beside, which is exact only where it began.
    source = sources.start if plan.lora.rank else checkpoint
    params, fixed = plan.split(source.params(plan.definition), teacher=_taught(plan, sources))
    place = lambda value: jax.device_put(value, shapes.step.sharding)
    state = TrainState(
        {ADAPTERS: stored.pop(ADAPTERS)} if plan.lora.rank else params,
        optimizer.from_dict(stored, like=shapes.optimizer),
        place(np.int32(checkpoint.step)),
        mean_loss=place(np.float32(checkpoint.data.get("mean", 0.0))),
        good_steps=place(np.int32(checkpoint.data.get("count", 0))),
    )
    return state, fixed


def begun(*, config: TrainConfig, plan: Plan, sources: Sources) -> tuple[TrainState, Fixed]:
    """The state before the first step, and what is fixed beside it."""
    definition = plan.definition
    if sources.start is None:
        whole = nn.initialize(definition, seed=config.seed)
    else:
        whole = sources.start.params(definition)
    params, fixed = plan.split(whole, teacher=_taught(plan, sources))
    if plan.lora.rank:
        params = plan.initial_adapters(seed=config.seed)
    return initial_state(definition, config=config, params=params, plan=plan), fixed


def kept(state: TrainState, fixed: Fixed, *, plan: Plan) -> tuple[Params, Params]:
    """(the model's parameters, the optimizer's dict) for a checkpoint; low-rank factors merged, and beside that."""
    trained = state.params
    return plan.exported(trained, fixed.frozen), optimizer.to_dict(state.optimizer) | _beside(plan, trained)


def _beside(plan: Plan, trained: Params) -> Params:
    return dict(trained) if plan.lora.rank else {}


def _taught(plan: Plan, sources: Sources) -> Params | None:
    return None if plan.teacher is None else sources.teacher.params(plan.definition)


def check_data(checkpoint: Checkpoint, *, path: str, fingerprint: str) -> None:
    """Raises UserError where the run was trained on other data than there is now."""
    before = checkpoint.data.get("fingerprint", fingerprint)
    if before != fingerprint:
        raise UserError(
            f"data.path={path!r} has changed since step {checkpoint.step} (its fingerprint was {before}, now"
            f" {fingerprint}), and its batches would be others: bring it back, or choose another run.dir"
        )
