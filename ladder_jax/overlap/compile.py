"""Compile a request's program in a process of its own, and keep the compiler's record of it in the
cache.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import multiprocessing
import os
import pathlib
import pkgutil
import re
import traceback
from multiprocessing.connection import Connection
from typing import Any

from ladder_jax import files, python, terminal
from ladder_jax.config import to_dict
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.overlap.request import Request
from ladder_jax.schedule import targets
from ladder_jax.schedule.targets import Target

# of the programs, and of what a compiler is told of a target: folders and files
SOURCES = (
    "config config/presets.json nn parallel residual scopes.py decode retrain train overlap/programs.py"
    " plan/confirm.py hardware.py schedule/targets.py"
).split()
PACKAGES = ("jax", "jaxlib", "flax", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
# variables of the environment that may change a program: of jax's all but the caches' and devices'
FLAGS = r"XLA_FLAGS|LIBTPU_INIT_ARGS|LADDER_JAX_GROUPED_MATMUL|JAX_(?!NUM_CPU|\w*CACHE)\w+"
# of the library's programs: training, and serving
DUMPED = "--xla_dump_hlo_as_text=true --xla_dump_hlo_module_re=.*jit_(step|local).*"


@dataclasses.dataclass(frozen=True)
class Record:
    """A compiler's results for one program; bytes are those of one device.

    hlo: text of the scheduled program.
    options: compiler options in force. launch: of the all-reduces that it hides, "chained" or
        "explicit".
    notices: warnings about options or settings that were dropped, with reasons.
    bytes_minimum: weights and cache, each read once (decode); None for other phases.
    bytes_accessed: the compiler's count; None if it gives none.
    bytes_per_device: at the peak: arguments, temporaries, code, and the outputs that do not reuse an
        argument's memory; None if compiled early.
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
    bytes_per_device: int | None = None


def read[R](path: str | os.PathLike, kind: type[R]) -> R | None:
    """The dataclass `kind` at `path`; None if it is missing or unreadable for this version. gzip
    has a checksum.
    """
    try:
        with gzip.open(path, "rt") as file:
            return kind(**json.load(file))
    except Exception:  # a damaged file raises errors of many kinds
        return None


def write(path: str | os.PathLike, record: Any) -> None:
    text = json.dumps(dataclasses.asdict(record))
    files.write(pathlib.Path(path), [gzip.compress(text.encode(), compresslevel=5)])


def compiled(request: Request, *, early: bool = False) -> Record:
    """The compiler's record of the request's program. Raises UserError if the program cannot be
    compiled.

    early: for TPUs, only until the order of operations is final; without costs and sizes.
    """
    early = early and request.target.platform == "tpu"
    function = "ladder_jax.overlap.programs:record"
    return recorded(Record, function, request, target=request.target, early=early)


def recorded[R](
    kind: type[R], function: str, request: Any, *, target: Target, early: bool = False
) -> R:
    """The dataclass `kind` that `function`, "module:name", makes of `request` in a process of its
    own; in the cache by its request, the compilers' versions and flags and the library's SOURCES.

    early: the function has a second argument, a folder into which XLA dumps a module once the order
    of operations is final.
    """
    if reason := targets.not_installed(target):
        raise UserError(f"target {target.name}: {reason}")
    flags = {
        name: value
        for name, value in os.environ.items()
        if re.fullmatch(FLAGS, name) and name not in targets.ENVIRONMENT
    }
    asked = [function, to_dict(request), early, python.versions(*PACKAGES), flags]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    root = pathlib.Path(__file__).parent.parent
    for part in SOURCES:
        for path in (root / part, *sorted((root / part).rglob("*.py"))):
            if path.is_file():
                digest.update(path.read_bytes())
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(files.cache("schedules"))
        path = folder / f"{digest.hexdigest()[:32]}.json.gz"
        if (kept := read(path, kind)) is not None:
            return kept
        arguments, flags = (request,), ""
        if early:
            dump = stack.enter_context(files.temporary())
            arguments, flags = (request, str(dump)), f"--xla_dump_to={dump} {DUMPED}"
        terminal.say(f"compiling for {target.name} (a minute or more)")
        record = apart(function, *arguments, target=target, flags=flags)
        try:
            write(path, record)
        except RunFailed as error:  # a full disk: what was compiled is not lost
            terminal.say(f"ladder-jax: {error}")
        return record


def apart(function: str, *arguments: Any, target: Target, flags: str = "") -> Any:
    """What `function`, "module:name", returns in a process of its own: jax reads its environment at
    import, and a compiler may be killed.

    flags: more XLA_FLAGS. Raises UserError if the function does, or if the process is killed.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, function, arguments), daemon=True)
    with contextlib.ExitStack() as stack:
        with python.starting(**_environment(target, flags)):
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)  # a compiler's threads may hang at the interpreter's end
        theirs.close()
        try:
            answer = ours.recv()
        except EOFError:
            process.join()
            raise UserError(
                f"the compiler for {target.name} ended with status {process.exitcode}: out of memory?"
            ) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _work(answers: Connection, function: str, arguments: tuple) -> None:
    """The process of `apart`. What a compiler prints is not shown."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        answer = pkgutil.resolve_name(function)(*arguments)
    except UserError as error:
        answer = error
    except Exception:
        answer = RuntimeError(f"compiling failed:\n{traceback.format_exc()}")
    answers.send(answer)


def _environment(target: Target, flags: str) -> dict[str, str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    if target.platform == "cuda":
        flags += " --xla_gpu_autotune_level=0"  # autotuning would run kernels, and there is no GPU
    # jax's compilation cache is off: it could return the same program with other operation names,
    # which we read.
    changes = {"XLA_FLAGS": flags.strip(), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if target.platform == "cpu":
        changes["JAX_NUM_CPU_DEVICES"] = target.shape
    return {**targets.ENVIRONMENT, **changes}
