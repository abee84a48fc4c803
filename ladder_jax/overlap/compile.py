"""Compile a request's program in a subprocess, and keep the compiler's record of it in the
cache.
"""

import contextlib
import dataclasses
import enum
import gzip
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from ladder_jax import files, python
from ladder_jax.errors import UserError
from ladder_jax.overlap.request import Request
from ladder_jax.schedule import targets
from ladder_jax.schedule.targets import Target

SOURCES = ("config", "config/presets.json", "nn", "parallel", "residual", "scopes.py")
TRAINING = ("retrain", "train")
TARGETS = ("hardware.py", "schedule/targets.py")  # what a compiler is told of a target
PACKAGES = ("jax", "jaxlib", "flax", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
MODULES = "jit_(step|local)"  # the library's programs: training, and serving


class Until(enum.Enum):
    """How far a program is compiled."""

    CODE = "code"
    # until the order of operations is final; without the compiler's costs and sizes
    SCHEDULE = "schedule"


@dataclasses.dataclass(frozen=True)
class Record:
    """A compiler's results for one program; bytes are those of one device.

    hlo: text of the scheduled program.
    options: compiler options in force. launch: of the all-reduces that it hides, "chained" or
        "explicit".
    notices: warnings about options or settings that were dropped, with reasons.
    bytes_minimum: weights and cache, each read once (decode); None for other phases.
    bytes_accessed: the compiler's count; None if it gives none.
    argument_bytes, output_bytes, alias_bytes, temporary_bytes, code_bytes: None if compiled until
        SCHEDULE.
    """

    hlo: str = dataclasses.field(repr=False)
    jax: str
    compiler: str
    options: dict
    launch: str
    notices: list[str]
    seconds: float
    bytes_minimum: int | None = None
    bytes_accessed: float | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    temporary_bytes: int | None = None
    code_bytes: int | None = None

    @property
    def bytes_per_device(self) -> int | None:
        """At the peak: arguments, temporaries, and the outputs that do not reuse an argument's
        memory.
        """
        if self.temporary_bytes is None:
            return None
        outputs = self.output_bytes - self.alias_bytes
        return self.argument_bytes + self.temporary_bytes + outputs + self.code_bytes


def read[R](path: str | os.PathLike, kind: type[R]) -> R | None:
    """The dataclass `kind` at `path`; None if it is missing or unreadable for this version. gzip
    has a checksum.
    """
    try:
        with gzip.open(path, "rt") as file:
            return kind(**json.load(file))
    except (OSError, EOFError, ValueError, TypeError, RecursionError, zlib.error):
        return None


def write(path: str, record: object) -> None:
    text = json.dumps(dataclasses.asdict(record))
    files.write(pathlib.Path(path), [gzip.compress(text.encode(), compresslevel=5)])


def compiled(request: Request, *, until: Until = Until.CODE) -> Record:
    """The compiler's record of the request's program. Raises UserError if the program cannot be
    compiled.

    until: SCHEDULE is for TPUs. On other targets, and if the whole program is in the cache, it has
        the effect of CODE.
    """
    worker = "ladder_jax.overlap.programs"
    label = f"{request.residual}, {request.layers} layers, {request.phase.value} for {request.target.name}"
    trained = TRAINING if request.trains else ["decode"]
    settings = dict(
        target=request.target, label=label, sources=(*SOURCES, "overlap/programs.py", *trained)
    )
    return recorded(Record, request.as_dict(), worker, until=until, **settings)


def recorded[R](
    kind: type[R],
    request: dict,
    module: str,
    *,
    target: Target,
    label: str,
    sources: Iterable[str],
    until: Until = Until.CODE,
) -> R:
    """The dataclass `kind` that `work` writes in the process of `module`; in the cache by its
    request, the compilers' versions and flags and the library's `sources`, files and folders.
    """
    if reason := targets.not_installed(target):
        raise UserError(f"target {target.name}: {reason}")
    flags = {name: os.environ.get(name, "") for name in FLAGS}
    asked = [module, request, python.versions(*PACKAGES), flags]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    root = pathlib.Path(__file__).parent.parent
    for part in (*sources, *TARGETS):
        for path in (
            sorted((root / part).rglob("*.py")) if (root / part).is_dir() else [root / part]
        ):
            digest.update(path.read_bytes())
    key = digest.hexdigest()[:32]
    with files.cache("schedules") as folder:
        early = until is Until.SCHEDULE and target.platform == "tpu"
        paths = [folder / f"{key}{end}.json.gz" for end in (["", "-schedule"] if early else [""])]
        for path in paths:
            if (kept := read(path, kind)) is not None:
                return kept
        last = paths[-1]
        run_worker(
            module, request, last, target=target, label=label, until=until if early else Until.CODE
        )
        return read(last, kind)


def run_worker(
    module: str,
    request: dict,
    path: pathlib.Path,
    *,
    target: Target,
    label: str,
    until: Until = Until.CODE,
) -> None:
    """Run `python -m module REQUEST.json PATH`, which writes `path`, with the environment that
    `target` needs.

    label: shown on the terminal. until: with SCHEDULE the worker has a third argument, a folder
    into which XLA dumps a module once the order of operations is final. Raises UserError if the
    worker refuses the request or is killed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = pathlib.Path(scratch, "request.json")
        errors = pathlib.Path(scratch, "stderr")
        source.write_text(json.dumps(request))
        command = python.command(module, str(source), str(path))
        environment = _environment(target)
        if until is Until.SCHEDULE:
            dump = f"{scratch}/dump"
            command.append(dump)
            module_re = f"--xla_dump_hlo_as_text=true --xla_dump_hlo_module_re=.*{MODULES}.*"
            environment["XLA_FLAGS"] += f" --xla_dump_to={dump} {module_re}"
        with errors.open("wb") as stderr, _progress(label):
            # ended with this process, if that is interrupted
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, env=environment)
        status = done.returncode
        answer = done.stdout
        if status == 2 and answer.strip():
            raise UserError(json.loads(answer.splitlines()[-1])["error"])
        if status < 0:
            name = signal.Signals(-status).name
            hint = ": out of memory?" if name == "SIGKILL" else ""
            raise UserError(f"the compiler for {target.name} was ended by {name}{hint}")
        if status or not path.exists():
            raise RuntimeError(
                f"compiling failed with status {status}:\n{errors.read_text()[-4000:]}"
            )


def work(record: Callable[..., object]) -> NoReturn:
    """The process of `run_worker`'s module: writes the dataclass `record(request)`. A user's
    mistake is one JSON line on standard output, {"error": ...}, and exit status 2; standard error
    has the compiler's log.
    """
    source, destination, *dump = sys.argv[1:]
    status = 0
    try:
        write(destination, record(json.loads(pathlib.Path(source).read_text()), *dump))
    except UserError as error:
        print(json.dumps({"error": str(error)}))
        status = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no normal exit: a compiler's threads may hang at the interpreter's end


def _environment(target: Target) -> dict[str, str]:
    flags = os.environ.get("XLA_FLAGS", "")
    if target.platform == "cuda":
        flags += " --xla_gpu_autotune_level=0"  # autotuning would run kernels, and there is no GPU
    # jax's compilation cache is off: it could return the same program with other operation names,
    # which we read.
    changes = {"XLA_FLAGS": flags.strip(), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if target.platform == "cpu":
        changes["JAX_NUM_CPU_DEVICES"] = target.shape
    return {**os.environ, **targets.ENVIRONMENT, **changes}


@contextlib.contextmanager
def _progress(label: str) -> Iterator[None]:
    from rich.console import Console

    console = Console(stderr=True)
    started = time.monotonic()
    with console.status(f"compiling {label} (a minute or more)"):
        yield
    console.print(
        f"compiling {label}: {time.monotonic() - started:.0f} s", style="dim", highlight=False
    )
