"""A whole run: the data, the folder, the weights or the checkpoint it resumes, its steps, and its
result.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from ladder_jax import nn, parallel, retrain
from ladder_jax.checkpoint import Checkpoint, Store
from ladder_jax.config import RunConfig
from ladder_jax.config.fields import check_type
from ladder_jax.data import dataset
from ladder_jax.data.dataset import DataLoader, Dataset
from ladder_jax.errors import UserError
from ladder_jax.files import AnyPath, explained
from ladder_jax.nn import ModelDef
from ladder_jax.nn.parameter import real_size
from ladder_jax.parallel import make_mesh, with_ranks
from ladder_jax.processes.agreement import TIMEOUT, Agreement
from ladder_jax.terminal import Say
from ladder_jax.train import checkpoints, folder, timing
from ladder_jax.train.folder import RunContext
from ladder_jax.train.gradients import Pretraining, TrainingTask
from ladder_jax.train.metrics import Metrics, SmallFiles, trackers
from ladder_jax.train.session import RESTORED, BadStepPolicy, Session
from ladder_jax.train.timing import Profiler, Throughput, TimeAccount


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended: losses in nats a token; `bigram_entropy` in nats a byte of the training
    text, if it is bytes.
    """

    steps: int
    validation_loss: float
    bigram_entropy: float | None
    parameters: int


def resolve(config: RunConfig) -> RunConfig:
    """`config` with the fields filled in that follow from the mesh. Raises UserError for an
    undecided interleave.
    """
    model = with_ranks(config.model, tensor=config.mesh.tensor)
    train = dataclasses.replace(config.train, interleave=config.train.interleave.parts)
    return dataclasses.replace(config, model=model, train=train)


def run(
    config: RunConfig,
    *,
    say: Say = print,
    profile: range | None = None,
    heartbeat: Callable[[str], None] = lambda doing: None,
    timeout: float = TIMEOUT,
) -> Result:
    """Train as `config` says, resuming from the run's last checkpoint; returns the final losses.

    profile: steps to trace into `profile/`; heartbeat: called with what comes next, alike on all
    processes; timeout: how many seconds one process waits for another. Raises UserError for a
    mistake, before anything is written; then RunFailed where the run cannot go on, and Stopped
    after SIGTERM or SIGINT. Only process 0 shows and logs.
    """
    check_type("config", config, RunConfig)
    account = TimeAccount()
    config = resolve(config)
    where = folder.path_of(config)
    agreement = Agreement("run", timeout=timeout)
    agreement.broadcast("whose folder this is", lambda: folder.check(config, where))
    parallel.use_compilation_cache()
    mesh = make_mesh(**config.mesh.axes)
    train = config.train
    if profile and profile[-1] > train.steps:
        raise UserError(f"--profile: step {profile[-1]} is past train.steps={train.steps}")
    record = agreement.broadcast(
        "when the run began", lambda: folder.beginning(where, now=account.began)
    )
    account.began = record["began"]
    account.restarts = record["restarts"]
    data = _load_data(config, where=where, agreement=agreement, began=account.began)
    if jax.process_index() > 0:
        say = lambda line: None

    with contextlib.ExitStack() as stack:
        stack.enter_context(_memory_explained(config, mesh))
        small = stack.enter_context(contextlib.closing(SmallFiles(where, say=say)))
        followers = trackers(config, folder=small.local)
        context = RunContext(
            config=config,
            tokenizer=data.tokenizer,
            folder=where,
            agreement=agreement,
            account=account,
            stop=stack.enter_context(folder.caught()),
            say=say,
            heartbeat=heartbeat,
        )
        with agreement.together("the lock of the run's folder"), explained(where, "write into"):
            if jax.process_index() == 0:
                stack.enter_context(folder.locked(where, say=say))
        if config.run.profiler_port is not None:  # for xprof, TensorBoard, jax.collect_profile
            jax.profiler.start_server(config.run.profiler_port + jax.process_index())
            stack.callback(jax.profiler.stop_server)
        say(
            f"on {mesh.size} of {len(jax.devices())} devices ({mesh.devices.flat[0].device_kind}), into {where}"
        )
        for note in (*data.notes, *config.without_effect):
            say(note)
        with agreement.together("the run's folder"), explained(where, "write into"):
            small.begin()
            if account.restarts:  # of a run without a checkpoint all time is lost
                account.go_back(None)

        checkpoint = checkpoints.newest(context)
        position = checkpoint.data if checkpoint else {}
        if checkpoint:
            checkpoints.check_data(checkpoint, path=config.data.path, fingerprint=data.fingerprint)
        task = _task(context, mesh, checkpoint)
        definition = task.definition
        mfu, formula = timing.mfu(config, definition=definition, mesh=mesh)
        say(formula)
        state, frozen = checkpoints.restore(checkpoint, context=context, task=task)
        if checkpoint:
            say(f"resuming {where} from step {checkpoint.step}")
            saved = position.get("account") or {}
            account.go_back(saved)
            account.restarts = max(account.restarts, saved.get("restarts", 0) + 1)
        elif task.origin:
            say(task.origin)
        first = int(state.step)
        heartbeat(f"step {first}")

        with agreement.together("the run's files"), explained(where, "write into"):
            folder.write_config(context)
            if first < train.steps:
                record |= {"restarts": account.restarts}
                folder.write_json(where / folder.GOODPUT, record, indent=None)
            metrics = Metrics(small, step=first, trackers=followers)
            stack.enter_context(contextlib.closing(metrics))
            store = Store(where / folder.CHECKPOINTS, config=config, timeout=timeout)
            stack.enter_context(contextlib.closing(store))
        checkpoints.check_shared(context)
        about = {
            "fingerprint": data.fingerprint,
            "sources": position.get("sources") or task.sources_record,
        }
        traces = small.local / folder.PROFILE
        if jax.process_count() > 1:  # those of one host would write the same file
            traces /= f"process_{jax.process_index()}"
        session = Session(
            context=context,
            task=task,
            state=state,
            frozen=frozen,
            loader=DataLoader(
                data.training, config=train, sharding=definition.layout.sharding("BT")
            ),
            held_out=dataset.evaluated(data.held_out, data.held_out_rows, config=train),
            policy=BadStepPolicy(
                train, left_out=dict.fromkeys(position.get("skipped", []), RESTORED)
            ),
            store=store,
            about=about,
            metrics=metrics,
            throughput=Throughput(account, tokens_a_step=train.batch * train.sequence, mfu=mfu),
            profiler=Profiler(profile or range(0), folder=traces, say=say),
        )
        session.run()
        result = Result(
            steps=int(session.state.step),
            validation_loss=session.finish(),
            bigram_entropy=None if data.text is None else dataset.bigram_entropy(data.text),
            parameters=_count(definition),
        )
        with agreement.together("the run's result"), explained(where, "write into"):
            folder.write_json(where / folder.RESULT, dataclasses.asdict(result))
            if first < train.steps:  # a finished run that is only evaluated took no time
                summary = account.summary()
                folder.write_json(where / folder.GOODPUT, summary)
                say(timing.goodput_text(summary))
    return result


def _load_data(config: RunConfig, *, where: AnyPath, agreement: Agreement, began: float) -> Dataset:
    """The run's data, which must be the same on all processes and at every start."""
    with agreement.together("reading the data"):
        data = dataset.load(
            config.data,
            train=config.train,
            vocab_size=config.model.vocab_size,
            tokenizer=retrain.tokenizer(config, folder=where) if config.train.start else None,
            began=began,
        )
    fingerprints = agreement.gather("the data", [data.fingerprint, data.tokenizer.name])
    for process, of_process in enumerate(fingerprints):
        if of_process != fingerprints[0]:
            raise UserError(
                f"process {process} of {len(fingerprints)} reads other data than process 0: data.path, data.tokenizer"
                " and run.dir must lead to the same files on all hosts"
            )
    return data


def _task(context: RunContext, mesh: Mesh, checkpoint: Checkpoint | None) -> TrainingTask:
    config = context.config
    if not config.retrains:
        return Pretraining(nn.define(config.model, mesh=mesh, experts=config.mesh.experts))
    recorded = checkpoint.data.get("sources", {}) if checkpoint else None
    return retrain.of_run(
        config,
        mesh=mesh,
        recorded=recorded,
        agreement=context.agreement,
        tokenizer=context.tokenizer,
    )


@contextlib.contextmanager
def _memory_explained(config: RunConfig, mesh: Mesh) -> Iterator[None]:
    """Turns jax's error where a device has not enough memory into a UserError, which says what
    would fit.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        _, exhausted, details = str(error).partition("RESOURCE_EXHAUSTED: ")
        if not exhausted:
            raise
        train = config.train
        reason = details.strip().splitlines()[0].rstrip(".")[:200]
        sizes = " x ".join(str(mesh.shape[axis]) for axis in ("data", "fsdp", "tensor"))
        raise UserError(
            f"not enough memory on {mesh.devices.flat[0].device_kind} for mesh {sizes},"
            f" train.remat={train.remat.value}, train.accumulate={train.accumulate} ({reason}):"
            " a larger mesh.fsdp or mesh.tensor, train.remat=full or a larger train.accumulate needs less;"
            f" what fits: ladder-jax plan --model MODEL --target TARGET"
            f" --tokens {train.batch * train.sequence} --sequence {train.sequence}"
        ) from None


def _count(definition: ModelDef) -> int:
    """Parameters, without the padding of vocabulary and experts."""
    count = 0
    leaves = jax.tree.leaves(definition.abstract)
    for leaf, dims in zip(leaves, jax.tree.leaves(definition.dims), strict=True):
        letters = dims.removeprefix("L")
        padded = leaf.shape[-len(letters)]
        count += leaf.size // padded * (real_size(letters, definition.config) or padded)
    return count
