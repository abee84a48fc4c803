"""Where a run goes on: its newest checkpoint, if that is whole and belongs to the same data."""

import dataclasses
import itertools
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ladder_jax import nn
from ladder_jax.checkpoint import Checkpoint, Damaged, manifest, open_checkpoint, steps
from ladder_jax.config import OnDamaged, RunConfig, TrainConfig, from_dict, to_dict
from ladder_jax.errors import UserError
from ladder_jax.nn import Params
from ladder_jax.parallel import Agreement
from ladder_jax.retrain import ADAPTERS, Fixed, Plan, Sources
from ladder_jax.train import optimizer
from ladder_jax.train.folder import writing
from ladder_jax.train.step import TrainState, abstract_state, initial_state

LATE = 90.0  # seconds until a shared file system shows what another host wrote: NFS remembers folders for up to 60


def newest(
    folder: pathlib.Path, *, config: RunConfig, say: Callable[[str], None], agreement: Agreement
) -> Checkpoint | None:
    """The newest checkpoint below `folder`, every file of it compared with its manifest; None if there is none.

    With run.on_damaged=previous a damaged one is put aside, as `<step>.damaged`. Raises Damaged otherwise, and where
    no whole one is left. On several processes the first one looks, and all go on from the one that it finds: what a
    shared file system shows the others may be older.
    """
    found = agreement.decided("which checkpoint is resumed", lambda: _told(_newest(folder, config=config, say=say)))
    if found is None:
        return None
    checkpoint = Checkpoint(**found | {"path": pathlib.Path(found["path"]), "config": from_dict(found["config"])})
    with agreement.together(f"whether all see checkpoint {str(checkpoint.path)!r}"):
        if checkpoint.listed and jax.process_index() > 0:
            _await(checkpoint.path, within=min(LATE, agreement.patience / 2))
    return checkpoint


def _newest(folder: pathlib.Path, *, config: RunConfig, say: Callable[[str], None]) -> Checkpoint | None:
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
            aside = _free(path)
            say(f"{damaged}: put aside as {aside.name}")
            with writing(folder):
                path.rename(aside)
    return None


def _free(path: pathlib.Path) -> pathlib.Path:
    """Where a damaged checkpoint goes: `20.damaged`, or after other ones of the same step `20.damaged.2`."""
    names = (f"{path.name}.damaged{f'.{n}' if n > 1 else ''}" for n in itertools.count(1))
    return next(aside for name in names if not os.path.lexists(aside := path.with_name(name)))


def _told(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """For the other processes."""
    if checkpoint is None:
        return None
    fields = {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(checkpoint)}
    return fields | {"path": str(checkpoint.path), "config": to_dict(checkpoint.config)}


def _await(folder: pathlib.Path, *, within: float) -> None:
    """Until this process sees all files, too. Raises UserError where it never does."""
    until = time.monotonic() + within
    while wrong := manifest.problems(folder, contents=False):
        if time.monotonic() > until:
            raise UserError(f"checkpoint {str(folder)!r} is not what process 0 sees: {wrong[0]} after {within:g} s")
        time.sleep(0.1)


def restored(
    checkpoint: Checkpoint, *, config: TrainConfig, plan: Plan, sources: Sources, agreement: Agreement
) -> tuple[TrainState, Fixed]:
    """The state that `checkpoint` holds, on the plan's mesh, and what is fixed beside it."""
    shapes = abstract_state(plan.definition, config=config, plan=plan)
    # Of low-rank factors the checkpoint holds the sum with what they are beside, which is exact only where it began.
    source = sources.start if plan.lora.rank else checkpoint
    with agreement.together("reading the checkpoint"):
        stored = checkpoint.optimizer(optimizer.to_dict(shapes.optimizer) | _beside(plan, plan.abstract))
        whole, taught = source.params(plan.definition), _taught(plan, sources)
    params, fixed = plan.split(whole, teacher=taught)
    place = lambda value: jax.device_put(value, shapes.step.sharding)
    state = TrainState(
        {ADAPTERS: stored.pop(ADAPTERS)} if plan.lora.rank else params,
        optimizer.from_dict(stored, like=shapes.optimizer),
        place(np.int32(checkpoint.step)),
        mean_loss=place(np.float32(checkpoint.data.get("mean", 0.0))),
        good_steps=place(np.int32(checkpoint.data.get("count", 0))),
    )
    return state, fixed


def begun(*, config: TrainConfig, plan: Plan, sources: Sources, agreement: Agreement) -> tuple[TrainState, Fixed]:
    """The state before the first step, and what is fixed beside it."""
    definition = plan.definition
    with agreement.together("reading the checkpoint that training starts from"):
        read = None if sources.start is None else sources.start.params(definition)
        taught = _taught(plan, sources)
    whole = nn.initialize(definition, seed=config.seed) if read is None else read
    params, fixed = plan.split(whole, teacher=taught)
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
