"""A run's folder: which run owns it, its lock, its small files, and which settings may change when
it is resumed; and what a run's parts share, the request to stop among it.

The lock keeps two runs out of one folder. On a disk it is the operating system's lock of a file,
which ends with the process. In an object store it is a lease, an object that its owner rewrites
every few seconds. All changes of it are conditional on the object's generation, which the store
compares. If the owner is killed, the object stays, and does not change any more: the next process
waits for EXPIRES seconds and takes it over. The owner ends before that, GIVES_UP seconds after it
began its last renewal that succeeded, which leaves time for an outage of more than a minute. No
clocks are compared.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import pathlib
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import jax
import tensorstore
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from ladder_jax import files, remote
from ladder_jax.config import Json, ModelConfig, MoEConfig, RunConfig, to_dict
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError, end_process
from ladder_jax.files import AnyPath, absolute, explained, is_remote, kvstore, patiently, read_text
from ladder_jax.processes.agreement import Agreement
from ladder_jax.terminal import Say
from ladder_jax.train import metrics
from ladder_jax.train.timing import TimeAccount

# The settings that may change when a run is resumed: where and how the same numbers are computed,
# which of them are logged and saved, and what happens at bad steps.
FREE = (
    "mesh.",
    "run.",
    "decode.",
    "train.loop",
    "train.remat",
    "train.accumulate",
    "train.sequence_parallel",
    "train.interleave",
    "train.collective_matmul",
    "train.loss_chunk",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep_",
    "train.evaluat",
    "train.on_bad_step",
    "train.spike_",
    "train.max_bad_steps",
    "train.rollback_batches",
    "train.peak_tflops",
)

CAUGHT = (signal.SIGTERM, signal.SIGINT)
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
PROFILE = "profile"
GOODPUT = "goodput.json"
RESULT = "result.json"
LOCK = ".lock"

# seconds
RENEWED = 10.0  # between renewals of a lease, and between looks at a disk's lock
GIVES_UP = 100.0  # of a lease, as EXPIRES
EXPIRES = 120.0

# jax stops a process that has not asked yet at the number 1, so a resumed run's steps would not do
_asked = itertools.count(1)


class StopRequest:
    """The signal that asks this run to stop, if one came.

    signum: the one that the run acts on; received: the one that this process received, of which the
    others of several processes may not know yet.
    """

    signum: signal.Signals | None = None
    received: signal.Signals | None = None

    def asked(self) -> bool:
        """Whether to stop now: the same answer on all processes, which ask equally often."""
        several = jax.process_count() > 1
        if several and multihost_utils.reached_preemption_sync_point(next(_asked)):
            self.signum = self.received or signal.SIGTERM
        return self.signum is not None


@contextlib.contextmanager
def caught() -> Iterator[StopRequest]:
    """While it is open, the first signal only sets the request; outside of the main thread none is
    caught.

    With several processes SIGTERM belongs to jax's own notifier, which informs all of them (see
    `StopRequest.asked`), and SIGINT is sent on as SIGTERM.
    """
    request = StopRequest()
    several = jax.process_count() > 1

    def handle(signum: int, _) -> None:
        received = signal.Signals(signum)
        if request.received is not None:
            end_process(f"{received.name} again: ending at once", status=128 + signum)
        request.received = received
        os.write(2, f"{received.name}: saving, then ending (once more: at once)\n".encode())
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            request.signum = received

    mine = (signal.SIGINT,) if several else CAUGHT
    if threading.current_thread() is not threading.main_thread():
        mine = ()
    before = {signum: signal.signal(signum, handle) for signum in mine}
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunContext:
    """What all parts of a run share.

    config: with everything that follows from the mesh; tokenizer: of the data; say: shows a line to
    the user, in process 0 alone; heartbeat: called with what comes next, alike on all processes.
    """

    config: RunConfig
    tokenizer: Tokenizer
    folder: AnyPath
    agreement: Agreement
    account: TimeAccount
    stop: StopRequest
    say: Say
    heartbeat: Callable[[str], None]


def path_of(config: RunConfig) -> AnyPath:
    """Raises UserError for an unknown scheme, for an object store whose library is missing, and for
    a name that tensorstore could not write to.
    """
    folder = absolute(config.run.dir or pathlib.Path("runs") / config.run.name)
    files.check_storable("run.dir=", folder)
    return folder


def check(config: RunConfig, folder: AnyPath) -> None:
    """Raises UserError where `folder` holds a run of another configuration, or is no run's folder.
    A run that made no step, for want of memory perhaps, may get another one.
    """
    with explained(folder, "read"):
        patiently(folder, lambda: _check(config, folder))


def _check(config: RunConfig, folder: AnyPath) -> None:
    file = folder / CONFIG
    if not file.is_file():
        data = config.data.path
        if is_remote(folder):
            remote.check_bucket(folder)
        elif folder.resolve().is_relative_to(files.local_path(data).resolve()):
            raise UserError(
                f"run.dir={str(folder)!r} lies in data.path={data!r}: its own files would become data,"
                " so that it could never be resumed"
            )
        if folder.exists() and not (folder.is_dir() and _is_free(folder)):
            raise UserError(
                f"run.dir={str(folder)!r} is not empty and holds no config.json: not a run's folder"
            )
        return
    try:
        before = flatten_dict(json.loads(read_text(file)), sep=".")
    except (ValueError, AssertionError, RecursionError):  # of what is no object, too
        raise UserError(f"{str(file)!r} cannot be read as JSON") from None
    after = flatten_dict(to_dict(config), sep=".")
    # a setting that did not exist then had its default
    has_experts = any(key.startswith("model.moe.") for key in before)
    defaults = RunConfig(model=ModelConfig(moe=MoEConfig())) if has_experts else RunConfig()
    before = flatten_dict(to_dict(defaults), sep=".") | before
    changed = {}
    for key in sorted(before | after):
        was = before.get(key)
        now = after.get(key)
        if was != now and not key.startswith(FREE):
            changed[key] = f"{key} was {was!r}, now {now!r}"
    # the folder's tokenizer is that of train.start
    if "train.start" in changed or changed and _has_steps(folder):
        raise UserError(
            f"{str(folder)!r} holds a run of another configuration ({'; '.join(changed.values())}):"
            " change it back, or choose another run.dir"
        )


def _has_steps(folder: AnyPath) -> bool:
    """Whether a step was logged, or saved in part."""
    log = folder / metrics.NAME
    if log.is_file() and log.read_bytes():
        return True
    saved = folder / CHECKPOINTS
    return saved.is_dir() and any(saved.iterdir())


def _is_free(folder: AnyPath) -> bool:
    """Whether it holds nothing but what stands before a run's configuration. Consoles of object
    stores show an empty folder as an object of the folder's name.
    """
    names = {file.name for file in folder.iterdir()}
    names -= {folder.name, LOCK, GOODPUT, tokenizers.FOLDER}
    return all(name.startswith(files.PARTIAL) for name in names)


def locked(
    folder: AnyPath, *, say: Say, lost: Callable[[str], None] = end_process
) -> contextlib.AbstractContextManager[None]:
    """Holds the lock of `folder`, which is made if it is missing, in a block. Raises UserError if
    another process does. Of a run's processes only the first takes it.

    lost: called in a thread, with a line, where a lease can no longer be renewed, before another
        process may take it and write into the folder; or where that was removed, or moved.
    """
    if is_remote(folder):
        return _lease(folder, say, lost)
    return _file_lock(folder, lost)


@contextlib.contextmanager
def _file_lock(folder: pathlib.Path, lost: Callable[[str], None]) -> Iterator[None]:
    """The file stays, but of a run that was refused nothing does."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(RENEWED):
            if _is_gone(folder / LOCK, lock):
                return lost(f"{str(folder)!r} was removed or moved")

    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    busy = f"another process is training in {str(folder)!r}"
    with files.locked(folder / LOCK, busy=busy) as lock:
        if not os.fstat(lock.fileno()).st_nlink:  # removed by a refused run, just now
            raise UserError(f"another process was about to train in {str(folder)!r}; try again")
        thread = threading.Thread(target=watch, name="lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            if made and not (folder / CONFIG).exists():
                for name in (GOODPUT, LOCK):
                    (folder / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _is_gone(file: pathlib.Path, opened: io.FileIO) -> bool:
    """By links and names, as a file's number may change on network file systems."""
    try:
        os.stat(file)
        return os.fstat(opened.fileno()).st_nlink == 0
    except FileNotFoundError:
        return True
    except OSError:  # a disk that does not answer now
        return False


@contextlib.contextmanager
def _lease(folder: AnyPath, say: Say, lost: Callable[[str], None]) -> Iterator[None]:
    store = tensorstore.KvStore.open(kvstore(folder)).result()
    done = threading.Event()
    owner = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}"
    counts = itertools.count()  # S3's generations follow from the content

    def written(generation: bytes, within: float | None = None) -> bytes:
        """The lease's next generation; empty where it is not of `generation`."""
        content = f"{owner} {next(counts)}".encode()
        return store.write(LOCK, content, if_equal=generation).result(within).generation

    free = _free(store, folder, say)
    renewed = time.monotonic()
    generation = written(free)
    if not generation:
        raise _busy(folder, store.read(LOCK).result().value)

    def renew() -> None:
        nonlocal generation, renewed
        while not done.wait(max(0.0, min(RENEWED, renewed + GIVES_UP - time.monotonic()))):
            began = time.monotonic()
            left = renewed + GIVES_UP - began
            if left <= 0:
                return lost(f"the lock of {str(folder)!r} could not be renewed for {GIVES_UP:g} s")
            within = min(RENEWED, left)
            # tensorstore's: no network; the next attempt may have one
            with contextlib.suppress(ValueError, OSError):
                if after := written(generation, within):
                    generation = after
                    renewed = began
                    continue
                found = store.read(LOCK).result(within)
                if not found.value.startswith(owner.encode()):  # empty where it is missing
                    return lost(f"another process has taken {str(folder)!r} over")
                # of an earlier attempt that succeeded without an answer
                generation = found.stamp.generation

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(ValueError, OSError):  # else it expires
            store.write(LOCK, None, if_equal=generation).result(RENEWED)


def _free(store: tensorstore.KvStore, folder: AnyPath, say: Say) -> bytes:
    """The generation of a lease that nobody holds, or renews any more."""
    found = store.read(LOCK).result()
    if found.value:  # a local run's lock that was copied here is empty
        before = found.stamp.generation
        until = time.monotonic() + EXPIRES
        say(f"{str(folder)!r} is locked: waiting {EXPIRES:g} s, in case its owner has been killed")
        while found.value and time.monotonic() < until:
            time.sleep(min(2.0, RENEWED / 2))
            found = store.read(LOCK).result()
            if found.value and found.stamp.generation != before:
                raise _busy(folder, found.value)
    return found.stamp.generation


def _busy(folder: AnyPath, content: bytes) -> UserError:
    host = content.decode(errors="replace").partition(" ")[0]
    return UserError(f"another process is training in {str(folder)!r}, on host {host}")


def beginning(folder: AnyPath, *, now: float) -> Json:
    """What GOODPUT says, to be written with this start: when the first one `began`, in seconds since
    1970, and how many `restarts` there were.

    Raises RunFailed where the record cannot be read now: a run's data may depend on it.
    """
    file = folder / GOODPUT
    read = lambda: read_text(file) if file.is_file() else "{}"
    try:
        with explained(folder, "read"):
            content = patiently(folder, read)
        found = json.loads(content)
        restarts = int(found.get("restarts", 0)) + 1
        return {**found, "began": float(found["began"]), "restarts": restarts}
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return {"began": now, "restarts": 0}


def write_config(context: RunContext) -> None:
    """In process 0 alone. The tokenizer comes first: a folder with a configuration has it whole."""
    folder = context.folder
    if jax.process_index() == 0:
        save = lambda: tokenizers.save(context.tokenizer, folder / tokenizers.FOLDER)
        patiently(folder, save)
    write_json(folder / CONFIG, to_dict(context.config))


def write_json(file: AnyPath, value: Json, *, indent: int | None = 2) -> None:
    """In process 0 alone."""
    if jax.process_index() == 0:
        text = json.dumps(value, indent=indent) + "\n"
        patiently(file, lambda: files.write(file, [text.encode()]))
