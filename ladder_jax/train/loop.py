"""The training loop: resume, step, log, save, evaluate."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable

import jax
import numpy as np

from ladder_jax import nn
from ladder_jax.checkpoint import Store, open_checkpoint, steps
from ladder_jax.config import RunConfig
from ladder_jax.data import batches, dataset, text
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.batch import Batch
from ladder_jax.data.dataset import Dataset
from ladder_jax.errors import UserError
from ladder_jax.nn import Definition
from ladder_jax.parallel import make_mesh, with_ranks
from ladder_jax.train import folder, optimizer
from ladder_jax.train.feed import Feed
from ladder_jax.train.progress import Progress
from ladder_jax.train.step import TrainState, abstract_state, initial_state, mean_loss, train_step


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended: losses in nats a token; `bigram_entropy` in nats a byte of the training text, if it is bytes."""

    steps: int
    validation_loss: float
    bigram_entropy: float | None
    parameters: int


def resolve(config: RunConfig) -> RunConfig:
    """`config` with what follows from the mesh written in."""
    model = with_ranks(config.model, tensor=config.mesh.tensor)
    return dataclasses.replace(config, model=model)


def run(config: RunConfig, *, say: Callable[[str], None] = print) -> Result:
    """Train as `config` says, resuming from the run's last checkpoint; returns the final losses.

    Raises UserError for anything that cannot work, before it writes anything.
    """
    config = resolve(config)
    place = folder.path_of(config)
    folder.check(config, place)
    mesh = make_mesh(**dataclasses.asdict(config.mesh))
    data = dataset.load(config.data, train=config.train, vocab_size=config.model.vocab_size)
    definition = nn.define(config.model, mesh=mesh)
    say(folder.describe(config))
    say(f"on {mesh.size} of {len(jax.devices())} devices ({mesh.devices.flat[0].device_kind}), into {place}")

    if saved := steps(place / "checkpoints"):
        checkpoint = open_checkpoint(place / "checkpoints" / str(saved[-1]))
        _check_data(checkpoint, data, config)
        state = _restored(config, definition, checkpoint)
        say(f"resuming {place} from step {saved[-1]}")
    else:
        state = initial_state(definition, config=config.train)
    place.mkdir(parents=True, exist_ok=True)
    tokenizers.save(data.tokenizer, place / tokenizers.FOLDER)
    folder.write_config(config, place)
    folder.rewind_metrics(place, step=int(state.step))

    with contextlib.closing(Store(place / "checkpoints", config=config, data=data.fingerprint)) as store:
        state = _steps(config, definition, state, data, store, place, say)

    result = Result(
        steps=int(state.step),
        validation_loss=_held_out_loss(config, definition, state, data),
        bigram_entropy=None if data.text is None else text.bigram_entropy(data.text),
        parameters=_count(definition),
    )
    folder.write_atomically(place / "result.json", json.dumps(dataclasses.asdict(result), indent=2) + "\n")
    return result


def _check_data(checkpoint, data: Dataset, config: RunConfig) -> None:
    if checkpoint.data not in (None, data.fingerprint):
        raise UserError(
            f"data.path={config.data.path!r} has changed since step {checkpoint.step} (its fingerprint was"
            f" {checkpoint.data}, now {data.fingerprint}): bring it back, or choose another run.dir"
        )


def _held_out_loss(config: RunConfig, definition: Definition, state: TrainState, data: Dataset) -> float:
    """Mean nats a token of the first few held-out batches."""
    loss = mean_loss(definition, loop=config.train.loop)
    rows = batches.Batches(data.held_out, config.train.batch)
    held_out = [rows[index] for index in range(batches.evaluated(data.held_out_rows, config=config.train))]
    sharding = definition.layout.sharding("BT")
    losses = [loss(state.params, jax.device_put(batch, sharding)) for batch in held_out]
    weights = [batch.predicted.sum() for batch in held_out] if isinstance(held_out[0], Batch) else None
    return float(np.average([float(one) for one in losses], weights=weights))


def _steps(config, definition: Definition, state: TrainState, data: Dataset, store: Store, place, say) -> TrainState:
    """All remaining steps. Each is dispatched before the metrics of the one before are read."""
    train = config.train
    first, last = int(state.step), train.steps
    if first >= last:
        return state
    feed = Feed(data, config=train, sharding=definition.layout.sharding("BT"))
    say("compiling the training step")
    step_fn = train_step(definition, config=train).compile(state, feed.abstract())
    tokens_a_step = train.batch * train.sequence

    with Progress(total=last, start=first, say=say) as progress:
        logged_at, logged_step, pending = time.perf_counter(), first, None

        def log(step, metrics):
            nonlocal logged_at, logged_step
            if step % train.log_every and step != last:
                return
            metrics = {name: float(value) for name, value in metrics.items()}  # waits for that step
            now = time.perf_counter()
            rate = (step - logged_step) * tokens_a_step / (now - logged_at)
            logged_at, logged_step = now, step
            row = {"step": step, "loss": metrics.pop("loss"), "tokens": step * tokens_a_step}
            row |= {"tokens_per_second": rate, **metrics}
            folder.append_metrics(place, row)
            progress.update(step, loss=row["loss"], tokens_per_second=rate)

        for step in range(first + 1, last + 1):
            try:
                batch = feed[step - 1]
            except UserError:  # unreadable data: what was computed is kept
                if pending:
                    log(*pending)
                    store.save(step - 1, params=state.params, optimizer=optimizer.to_dict(state.optimizer))
                raise
            state, metrics = step_fn(state, batch)
            if pending:
                log(*pending)
            pending = (step, metrics)
            if step % train.checkpoint_every == 0 or step == last:
                log(*pending)
                pending = None
                store.save(step, params=state.params, optimizer=optimizer.to_dict(state.optimizer))
    return state


def _restored(config: RunConfig, definition: Definition, checkpoint) -> TrainState:
    shapes = abstract_state(definition, config=config.train)
    moments = checkpoint.optimizer(optimizer.to_dict(shapes.optimizer))
    return TrainState(
        checkpoint.params(definition),
        optimizer.from_dict(moments, like=shapes.optimizer),
        jax.device_put(np.int32(checkpoint.step), shapes.step.sharding),
    )


def _count(definition: Definition) -> int:
    """Parameters, without the vocabulary's padding."""
    padding = 0
    for leaf, dims in zip(jax.tree.leaves(definition.abstract), jax.tree.leaves(definition.dims), strict=True):
        if dims.startswith("V"):
            padding += (leaf.shape[0] - definition.config.vocab_size) * leaf.shape[1]
    return sum(leaf.size for leaf in jax.tree.leaves(definition.abstract)) - padding
