"""A run's checkpoints: the state before the first step, the newest checkpoint and its state, and
saving.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ladder_jax.checkpoint import Checkpoint, Damaged, Store, manifest, open_checkpoint, steps
from ladder_jax.config import OnDamaged
from ladder_jax.errors import UserError
from ladder_jax.files import AnyPath, explained, patiently
from ladder_jax.nn import Params
from ladder_jax.train.folder import CHECKPOINTS, CONFIG, RunContext
from ladder_jax.train.gradients import TrainingTask
from ladder_jax.train.step import (
    TrainState,
    abstract_state,
    initial_state,
    optimizer_from_dict,
    optimizer_to_dict,
)

# seconds until a shared file system shows another host's files: NFS caches folders for up to 60
VISIBLE_WITHIN = 90.0


def restore(
    checkpoint: Checkpoint | None, *, context: RunContext, task: TrainingTask
) -> tuple[TrainState, Params]:
    """The state that `checkpoint` holds, on the task's mesh, and the frozen parameters; None: those
    before the first step.
    """
    train = context.config.train
    if checkpoint is None:
        with context.agreement.together("reading the checkpoint that training starts from"):
            trained, frozen = task.initial(seed=train.seed)
        return initial_state(task.definition, config=train, params=trained, task=task), frozen
    shapes = abstract_state(task.definition, config=train, task=task)
    extra = task.extra(task.abstract)
    with context.agreement.together("reading the checkpoint"):
        stored = checkpoint.optimizer(optimizer_to_dict(shapes.optimizer) | extra)
        trained, frozen = task.restored(checkpoint, extra={name: stored[name] for name in extra})
    place = lambda value: jax.device_put(value, shapes.step.sharding)
    state = TrainState(
        trained,
        optimizer_from_dict(stored, like=shapes.optimizer),
        place(np.int32(checkpoint.step)),
        mean_loss=place(np.float32(checkpoint.data.get("mean", 0.0))),
        good_steps=place(np.int32(checkpoint.data.get("count", 0))),
    )
    return state, frozen


def newest(context: RunContext) -> Checkpoint | None:
    """The run's newest checkpoint, every file of it compared with its manifest; None if there is
    none.

    With run.on_damaged=previous the manifest of a damaged one is renamed. Raises Damaged
    otherwise, and where no undamaged one is left. With several processes the first one searches,
    and all resume from the checkpoint that it returns: the others may see an older state of a
    shared file system.
    """
    agreement = context.agreement
    folder = context.folder / CHECKPOINTS
    found = agreement.broadcast(
        "which checkpoint is resumed", lambda: _newest(folder, context=context)
    )
    if found is None:
        return None
    step, has_manifest = found
    path = folder / str(step)
    with agreement.together(f"whether all see checkpoint {str(path)!r}"):
        if has_manifest and jax.process_index() > 0:
            _await(path, lambda: manifest.problems(path, contents=()), timeout=agreement.timeout)
        checkpoint = open_checkpoint(path)
    return dataclasses.replace(checkpoint, verified=has_manifest)  # by process 0, for all


def check_shared(context: RunContext) -> None:
    """Raises UserError where a process does not see the run's folder, which process 0 has made."""
    folder = context.folder
    missing = f"{CONFIG} is missing (run.dir must lie on a file system that all hosts share)"
    seen = lambda: [] if (folder / CONFIG).is_file() else [missing]
    agreement = context.agreement
    with agreement.together("whether all see the run's folder"), explained(folder, "read"):
        if jax.process_index() > 0:
            _await(folder, lambda: patiently(folder, seen), timeout=agreement.timeout)


def check_data(checkpoint: Checkpoint, *, path: str, fingerprint: str) -> None:
    """Raises UserError where the run was trained on other data than `path` holds now."""
    before = checkpoint.data.get("fingerprint", fingerprint)
    if before != fingerprint:
        raise UserError(
            f"data.path={path!r} has changed since step {checkpoint.step} (its fingerprint was {before}, now"
            f" {fingerprint}), and its batches would be others: bring it back, or choose another run.dir"
        )


def save(
    store: Store,
    state: TrainState,
    frozen: Params,
    *,
    context: RunContext,
    task: TrainingTask,
    validation: float | None = None,
    **about: Any,
) -> None:
    """Start to save a state in the background; a later `store.failure()` says if that went wrong.

    about: more JSON values of the run, by name, for the item `data`.
    """
    position = {
        "tokenizer": context.tokenizer.name,
        "mean": float(state.mean_loss),
        "count": int(state.good_steps),
        "account": context.account.as_dict(),
    }
    store.save(
        int(state.step),  # the next batch is that of the step after it
        params=task.exported(state.params, frozen),
        optimizer=optimizer_to_dict(state.optimizer) | task.extra(state.params),
        data=position | about,
        validation_loss=validation,
    )


def _newest(folder: AnyPath, *, context: RunContext) -> tuple[int, bool] | None:
    """The step of the newest whole checkpoint, and whether it has a manifest. Puts damaged ones
    aside, or raises.
    """
    with explained(folder, "read"):
        saved = patiently(folder, lambda: steps(folder))
    for step in reversed(saved):
        path = folder / str(step)
        try:
            with explained(path, "read"):
                checkpoint = patiently(path, lambda: open_checkpoint(path).check())
            return step, checkpoint.has_manifest
        except Damaged as damaged:
            if context.config.run.on_damaged is OnDamaged.STOP:
                raise Damaged(
                    f"{damaged} (run.on_damaged=previous puts it aside and goes on from there)"
                ) from None
            if step == saved[0]:
                raise Damaged(
                    f"{damaged}, and there is no whole one before it: choose another run.dir"
                ) from None
            with explained(folder, "write into"):  # it does not count without its manifest
                (path / manifest.NAME).rename(path / manifest.DAMAGED)
            context.say(f"{damaged}: put aside, its manifest as {manifest.DAMAGED}")
    return None


def _await(folder: AnyPath, problems: Callable[[], list[str]], *, timeout: float) -> None:
    """Waits until this process sees all files of the folder. Raises UserError where it never
    does.
    """
    within = min(VISIBLE_WITHIN, timeout / 2)
    until = time.monotonic() + within
    while wrong := problems():
        if time.monotonic() > until:
            raise UserError(
                f"{str(folder)!r} is not what process 0 sees: {wrong[0]} after {within:g} s"
            )
        time.sleep(0.1)
