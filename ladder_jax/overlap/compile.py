"""Compile a request's program in a subprocess, and cache the compiler's record of it (see `record`)."""

import ast
import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator

from ladder_jax import files, python
from ladder_jax.config import Phase
from ladder_jax.errors import UserError
from ladder_jax.overlap import record, scheduled
from ladder_jax.overlap.record import Record, Until
from ladder_jax.overlap.request import Request
from ladder_jax.schedule import targets
from ladder_jax.schedule.targets import Target

PROGRAMS = ("overlap/programs.py", "overlap/scheduled.py", "overlap/worker.py")
SOURCES = ("config", "nn", "parallel", "residual", *PROGRAMS)
TRAINING = ("retrain", "train")
PACKAGES = ("jax", "jaxlib", "flax", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")


def compiled(request: Request, *, until: Until = Until.CODE) -> Record:
    """The compiler's record of the request's program. Raises UserError if the program cannot be compiled.

    until: SCHEDULE is for TPUs. On other targets, and if the whole program is in the cache, it has the effect of CODE.
    """
    if reason := targets.not_installed(request.target):
        raise UserError(f"target {request.target.name}: {reason}")
    with files.cache(record.FOLDER) as folder:
        return _cached_or_compiled(request, folder=folder, until=until)


def _cached_or_compiled(request: Request, *, folder: pathlib.Path, until: Until) -> Record:
    key = _key(request)
    path = folder / f"{key}.json.gz"
    cached = record.read(path)
    if cached is None and until is Until.SCHEDULE and request.target.platform == "tpu":
        path = folder / f"{key}-schedule.json.gz"
        cached = record.read(path)
    else:
        until = Until.CODE
    if cached is not None:
        return cached
    label = f"{request.residual}, {request.layers} layers, {request.phase.value} for {request.target.name}"
    worker = "ladder_jax.overlap.worker"
    run_worker(worker, request.as_dict(), path, target=request.target, label=label, until=until)
    return record.read(path)


def run_worker(
    module: str, request: dict, path: pathlib.Path, *, target: Target, label: str, until: Until = Until.CODE
) -> None:
    """Run `python -m module REQUEST.json PATH`, which writes `path`, with the environment that `target` needs.

    label: shown on the terminal. until: with SCHEDULE the worker has a third argument, the folder of the compiler's
    dump. Raises UserError if the worker refuses the request or is killed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source, errors = pathlib.Path(scratch, "request.json"), pathlib.Path(scratch, "stderr")
        source.write_text(json.dumps(request))
        command = python.command(module, str(source), str(path))
        environment = _environment(target)
        if until is Until.SCHEDULE:
            dump = pathlib.Path(scratch, "dump")
            command.append(str(dump))
            environment["XLA_FLAGS"] += f" {scheduled.flags(dump)}"
        with errors.open("wb") as stderr, _progress(label):
            status, answer = _run(command, stdout=subprocess.PIPE, stderr=stderr, env=environment)
        if status == 2 and answer.strip():
            raise UserError(json.loads(answer.splitlines()[-1])["error"])
        if status < 0:
            name = signal.Signals(-status).name
            hint = ": out of memory?" if name == "SIGKILL" else ""
            raise UserError(f"the compiler for {target.name} was ended by {name}{hint}")
        if status or not path.exists():
            raise RuntimeError(f"compiling failed with status {status}:\n{errors.read_text()[-4000:]}")


def _run(command: list[str], **arguments) -> tuple[int, bytes]:
    """Run a process; return its exit status and standard output. Ctrl-C kills it at any time.

    The signal handler itself raises nothing: an exception would be lost inside a callback of the garbage collector, and
    during Popen's start it would leave the process running.
    """
    interrupted, started = False, []

    def stop(*_) -> None:
        nonlocal interrupted
        interrupted = True
        for process in started:
            process.kill()

    in_main_thread = threading.current_thread() is threading.main_thread()  # only this thread can set handlers
    previous = signal.signal(signal.SIGINT, stop) if in_main_thread else None
    try:
        with subprocess.Popen(command, **arguments) as process:
            started.append(process)
            if interrupted:
                process.kill()
            answer, _ = process.communicate()
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, previous)
    if interrupted:
        raise KeyboardInterrupt
    return process.returncode, answer


def _environment(target: Target) -> dict[str, str]:
    flags = os.environ.get("XLA_FLAGS", "")
    if target.platform == "cuda":
        flags += " --xla_gpu_autotune_level=0"  # autotuning would run kernels, and there is no GPU
    # jax's compilation cache is off: it could return the same program with other operation names, which we read.
    environment = {
        **os.environ,
        **targets.ENVIRONMENT,
        "XLA_FLAGS": flags.strip(),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    if target.platform == "cpu":
        environment["JAX_NUM_CPU_DEVICES"] = target.shape
    return environment


def _key(request: Request) -> str:
    """The cache's key: a hash of the request, the compilers' versions and this library's source."""
    digest = hashlib.sha256(json.dumps(request.as_dict(), sort_keys=True).encode())
    return with_sources(digest, (*SOURCES, *(TRAINING if request.phase is Phase.TRAIN else ["decode"]))).hexdigest()[
        :32
    ]


def with_sources(digest, parts: Iterable[str]):
    """Update hashlib's `digest` with the compilers' versions and with those files and folders of this library."""
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    root = pathlib.Path(__file__).parent.parent
    for part in parts:
        for path in sorted((root / part).rglob("*.py")) if (root / part).is_dir() else [root / part]:
            digest.update(_code(path).encode())
    return digest


def _code(path: pathlib.Path) -> str:
    """A module's source without comments and docstrings, which change no compiled program."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


@contextlib.contextmanager
def _progress(label: str) -> Iterator[None]:
    from rich.console import Console

    console = Console(stderr=True)
    started = time.monotonic()
    with console.status(f"compiling {label} (a minute or more)") if console.is_terminal else contextlib.nullcontext():
        yield
    console.print(f"compiling {label}: {time.monotonic() - started:.0f} s", style="dim", highlight=False)
