"""A whole run: what it needs, where it goes on, its steps, and what it leaves."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable

import jax

from ladder_jax import nn, parallel, retrain
from ladder_jax.checkpoint import Store
from ladder_jax.config import RunConfig, to_dict
from ladder_jax.data import batches, dataset, text
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.errors import UserError
from ladder_jax.nn import ModelDef
from ladder_jax.parallel import PATIENCE, Agreement, make_mesh, with_ranks
from ladder_jax.retrain import sources
from ladder_jax.train import folder, goodput, memory, resume, signals
from ladder_jax.train.evaluation import Evaluation
from ladder_jax.train.feed import Feed
from ladder_jax.train.goodput import Account
from ladder_jax.train.keeper import Keeper
from ladder_jax.train.metrics import Metrics
from ladder_jax.train.mfu import mfu
from ladder_jax.train.policy import Judge
from ladder_jax.train.profile import Profile
from ladder_jax.train.session import Session
from ladder_jax.train.speed import Speed
from ladder_jax.train.trackers import trackers


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


def run(
    config: RunConfig,
    *,
    say: Callable[[str], None] = print,
    profile: range | None = None,
    beat: Callable[[str], None] = lambda doing: None,
    patience: float = PATIENCE,
) -> Result:
    """Train as `config` says, resuming from the run's last checkpoint; returns the final losses.

    profile: steps to trace into `profile/`; beat: told what comes next, alike on all processes; patience: seconds that
    one process waits for another's word. Raises UserError for anything that cannot work, before it writes anything;
    then RunFailed for what stops a run, and Stopped after SIGTERM or SIGINT. Only process 0 shows and logs.
    """
    account = Account()
    config = resolve(config)
    place = folder.path_of(config)
    agreement = Agreement("run", patience=patience)
    agreement.decided("whose folder this is", lambda: folder.check(config, place))
    parallel.use_compilation_cache()
    mesh = make_mesh(**dataclasses.asdict(config.mesh))
    if profile and profile[-1] > config.train.steps:
        raise UserError(f"--profile: step {profile[-1]} is past train.steps={config.train.steps}")
    vocab_size = config.model.vocab_size
    with agreement.together("reading the data"):
        tokenizer = sources.tokenizer(config, folder=place)
        data = dataset.load(config.data, train=config.train, vocab_size=vocab_size, tokenizer=tokenizer)
    agreement.concluded("the data", [data.fingerprint, data.tokenizer.name], _check_alike)
    definition = nn.define(config.model, mesh=mesh)
    shown = trackers(config, folder=place)
    say = say if jax.process_index() == 0 else lambda line: None

    with memory.explained(config, mesh=mesh), contextlib.ExitStack() as stack:
        asked = stack.enter_context(signals.caught())
        with agreement.together("the lock of the run's folder"):
            stack.enter_context(folder.owned(place))
        say(folder.describe(config))
        say(f"on {mesh.size} of {len(jax.devices())} devices ({mesh.devices.flat[0].device_kind}), into {place}")
        for note in data.notes:
            say(note)
        with agreement.together("the run's folder"), folder.writing(place):
            goodput.begin(account, file=place / goodput.NAME)
        position = {}
        checkpoint = resume.newest(place / "checkpoints", config=config, say=say, agreement=agreement)
        if checkpoint:
            resume.check_data(checkpoint, path=config.data.path, fingerprint=data.fingerprint)
            position = checkpoint.data
        noted = position.get("sources", {}) if checkpoint else None
        told = agreement.decided("where weights come from", lambda: sources.of_run(config, noted=noted).noted())
        with agreement.together("where weights come from"):
            taken = sources.of_run(config, noted=noted, told=told)
        teacher = sources.teacher_model(config, taken)
        plan = retrain.of_run(config, definition=definition, teacher=teacher)
        utilisation = mfu(plan, config=config.train, mesh=mesh)
        say(utilisation.said)
        known = dict(config=config.train, plan=plan, sources=taken, agreement=agreement)
        if checkpoint:
            state, fixed = resume.restored(checkpoint, **known)
            say(f"resuming {place} from step {checkpoint.step}")
            account.go_back(position.get("account"), restarts=1)
        else:
            state, fixed = resume.begun(**known)
            if taken.start:
                say(f"starting from {taken.start.path}, {taken.start.config.model.residual}")
        noted = position.get("sources") or taken.noted()
        step = int(state.step)
        beat(f"step {step}")
        with agreement.together("the run's files"), folder.writing(place):
            describe = lambda: _write_json(place / folder.CONFIG, to_dict(config))
            describe()
            if jax.process_index() == 0:
                tokenizers.save(data.tokenizer, place / tokenizers.FOLDER)
            metrics = stack.enter_context(contextlib.closing(Metrics(place, step=step, trackers=shown, say=say)))
            store = Store(place / "checkpoints", config=config, patience=patience)
            stack.enter_context(contextlib.closing(store))
        train = config.train
        held_out = batches.evaluated(data.held_out, data.held_out_rows, config=train)
        judge = Judge(train, skipped=position.get("skipped", []))
        session = Session(
            config=config,
            plan=plan,
            sources=taken,
            folder=place,
            state=state,
            fixed=fixed,
            feed=Feed(data, config=train, sharding=definition.layout.sharding("BT")),
            evaluation=Evaluation(plan, held_out, config=train, account=account, asked=asked),
            judge=judge,
            keeper=Keeper(
                store,
                fingerprint=data.fingerprint,
                metrics=metrics,
                judge=judge,
                account=account,
                plan=plan,
                noted=noted,
                agreement=agreement,
                describe=describe,
            ),
            agreement=agreement,
            metrics=metrics,
            speed=Speed(account, tokens_a_step=train.batch * train.sequence, mfu=utilisation, step=step),
            profile=Profile(profile, folder=place / "profile"),
            account=account,
            asked=asked,
            say=say,
            beat=beat,
        )
        session.run()
        result = Result(
            steps=int(session.state.step),
            validation_loss=session.finish(),
            bigram_entropy=None if data.text is None else text.bigram_entropy(data.text),
            parameters=_count(definition),
        )
        with agreement.together("the run's result"), folder.writing(place):
            _write_json(place / "result.json", dataclasses.asdict(result))
            if step < train.steps:  # a finished run that is only evaluated took no time
                summary = account.summary()
                _write_json(place / goodput.NAME, summary)
                say(goodput.as_text(summary))
    return result


def _check_alike(data: list[list[str]]) -> None:
    for process, found in enumerate(data):
        if found != data[0]:
            raise UserError(
                f"process {process} of {len(data)} reads other data than process 0: data.path, data.tokenizer and"
                " run.dir must lead to the same files on all hosts"
            )


def _write_json(file: pathlib.Path, value: dict) -> None:
    if jax.process_index() == 0:
        folder.write_atomically(file, json.dumps(value, indent=2) + "\n")


def _count(definition: ModelDef) -> int:
    """Parameters, without the vocabulary's padding."""
    padding = 0
    for leaf, dims in zip(jax.tree.leaves(definition.abstract), jax.tree.leaves(definition.dims), strict=True):
        if dims.startswith("V"):
            padding += (leaf.shape[0] - definition.config.vocab_size) * leaf.shape[1]
    return sum(leaf.size for leaf in jax.tree.leaves(definition.abstract)) - padding
