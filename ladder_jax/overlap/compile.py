"""Compile a request's program in a subprocess, once: the records are kept (see `record`)."""

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
    """What the compiler says of the request's program. Raises UserError where it cannot compile it.

    until: SCHEDULE is for TPUs; elsewhere, and where more is known already, it is as CODE.
    """
    if reason := targets.not_installed(request.target):
        raise UserError(f"target {request.target.name}: {reason}")
    with files.cache(record.FOLDER) as folder:
        return _kept(request, folder=folder, until=until)


def _kept(request: Request, *, folder: pathlib.Path, until: Until) -> Record:
    key = _key(request)
    path = folder / f"{key}.json.gz"
    found = record.read(path)
    if found is None and until is Until.SCHEDULE and request.target.platform == "tpu":
        path = folder / f"{key}-schedule.json.gz"
        found = record.read(path)
    else:
        until = Until.CODE
    if found is None:
        what = f"{request.residual}, {request.layers} layers, {request.phase.value} for {request.target.name}"
        worker = "ladder_jax.overlap.worker"
        run_worker(worker, request.as_dict(), path, target=request.target, what=what, until=until)
        found = record.read(path)
    return found


def run_worker(
    module: str, asked: dict, path: pathlib.Path, *, target: Target, what: str, until: Until = Until.CODE
) -> None:
    """Has `python -m module ASKED.json PATH` write `path`, in the environment in which `target` is compiled for.

    what: named on the terminal. until: SCHEDULE gives the worker a third argument, the folder of the compiler's dump.
    Raises UserError for what the worker refuses, and where it is killed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source, said = pathlib.Path(scratch, "request.json"), pathlib.Path(scratch, "stderr")
        source.write_text(json.dumps(asked))
        command = python.command(module, str(source), str(path))
        environment = _environment(target)
        if until is Until.SCHEDULE:
            dump = pathlib.Path(scratch, "dump")
            command.append(str(dump))
            environment["XLA_FLAGS"] += f" {scheduled.flags(dump)}"
        with said.open("wb") as noise, _progress(what):
            status, answer = _run(command, stdout=subprocess.PIPE, stderr=noise, env=environment)
        if status == 2 and answer.strip():
            raise UserError(json.loads(answer.splitlines()[-1])["error"])
        if status < 0:
            name = signal.Signals(-status).name
            hint = ": out of memory?" if name == "SIGKILL" else ""
            raise UserError(f"the compiler for {target.name} was ended by {name}{hint}")
        if status or not path.exists():
            raise RuntimeError(f"compiling failed with status {status}:\n{said.read_text()[-4000:]}")


def _run(command: list[str], **arguments) -> tuple[int, bytes]:
    """Popen's exit status and standard output. Ctrl-C ends the process too, whenever it comes.

    The handler raises nothing: an exception is lost in a callback of the garbage collector, and thrown while the
    process is being started it would leave that behind.
    """
    pressed, started = False, []

    def stop(*_) -> None:
        nonlocal pressed
        pressed = True
        for process in started:
            process.kill()

    mine = threading.current_thread() is threading.main_thread()  # others get no signals
    before = signal.signal(signal.SIGINT, stop) if mine else None
    try:
        with subprocess.Popen(command, **arguments) as process:
            started.append(process)
            if pressed:
                process.kill()
            answer, _ = process.communicate()
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
    return process.returncode, answer


def _environment(target: Target) -> dict[str, str]:
    flags = os.environ.get("XLA_FLAGS", "")
    if target.platform == "cuda":
        flags += " --xla_gpu_autotune_level=0"  # autotuning runs kernels, and there is no GPU to run them
    # jax's own cache would give a program back under the names that its operations had when it was compiled.
    found = {**os.environ, **targets.ENVIRONMENT, "XLA_FLAGS": flags.strip(), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if target.platform == "cpu":
        found["JAX_NUM_CPU_DEVICES"] = target.shape
    return found


def _key(request: Request) -> str:
    """Changes with the request, the compilers and this library's own source."""
    digest = hashlib.sha256(json.dumps(request.as_dict(), sort_keys=True).encode())
    return with_sources(digest, (*SOURCES, *(TRAINING if request.phase is Phase.TRAIN else ["decode"]))).hexdigest()[
        :32
    ]


def with_sources(digest, parts: Iterable[str]):
    """`digest` (of hashlib), updated with the versions of the compilers and those files and folders of this library."""
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    root = pathlib.Path(__file__).parent.parent
    for part in parts:
        for path in sorted((root / part).rglob("*.py")) if (root / part).is_dir() else [root / part]:
            digest.update(_code(path).encode())
    return digest


def _code(path: pathlib.Path) -> str:
    """A module without its comments and docstrings, which change no program."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    from rich.console import Console

    console = Console(stderr=True)
    started = time.monotonic()
    with console.status(f"compiling {what} (a minute or more)") if console.is_terminal else contextlib.nullcontext():
        yield
    console.print(f"compiling {what}: {time.monotonic() - started:.0f} s", style="dim", highlight=False)
