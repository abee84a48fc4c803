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
from ladder_jax.data import batches, text
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.nn import Definition
from ladder_jax.parallel import make_mesh, with_ranks
from ladder_jax.train import folder, optimizer
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
    tokenizer = tokenizers.load(config.data.tokenizer)
    tokenizers.check_vocabulary(tokenizer, vocab_size=config.model.vocab_size)
    content = text.tokens(text.load(config.data), tokenizer=tokenizer)
    train_text, held_out_text = batches.split(content, config=config.data)
    dataset = batches.training(train_text, config=config.train)
    held_out = batches.held_out(held_out_text, config=config.train)
    definition = nn.define(config.model, mesh=mesh)
    say(folder.describe(config))
    say(f"on {mesh.size} of {len(jax.devices())} devices ({mesh.devices.flat[0].device_kind}), into {place}")

    if saved := steps(place / "checkpoints"):
        state = _restored(config, definition, open_checkpoint(place / "checkpoints" / str(saved[-1])))
        say(f"resuming {place} from step {saved[-1]}")
    else:
        state = initial_state(definition, config=config.train)
    place.mkdir(parents=True, exist_ok=True)
    tokenizers.save(tokenizer, place / tokenizers.FOLDER)
    folder.write_config(config, place)
    folder.rewind_metrics(place, step=int(state.step))

    with contextlib.closing(Store(place / "checkpoints", config=config)) as store:
        state = _steps(config, definition, state, dataset, store, place, say)

    loss = mean_loss(definition, loop=config.train.loop)
    sharding = definition.layout.sharding("BT")
    result = Result(
        steps=int(state.step),
        validation_loss=float(np.mean([loss(state.params, jax.device_put(b, sharding)) for b in held_out])),
        bigram_entropy=text.bigram_entropy(train_text) if tokenizer.name == tokenizers.BYTES else None,
        parameters=_count(definition),
    )
    folder.write_atomically(place / "result.json", json.dumps(dataclasses.asdict(result), indent=2) + "\n")
    return result


def _steps(config, definition: Definition, state: TrainState, dataset, store: Store, place, say) -> TrainState:
    """All remaining steps. Each is dispatched before the metrics of the one before are read."""
    train = config.train
    first, last = int(state.step), train.steps
    if first >= last:
        return state
    sharding = definition.layout.sharding("BT")
    say("compiling the training step")
    example = jax.ShapeDtypeStruct((train.batch, train.sequence + 1), np.int32, sharding=sharding)
    step_fn = train_step(definition, config=train).compile(state, example)
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
            tokens = jax.device_put(dataset[step - 1], sharding)
            state, metrics = step_fn(state, tokens)
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
