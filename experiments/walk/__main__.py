"""How many files of the library one command passes through: what a newcomer opens to follow it.

    python -m experiments.walk [--list] [--out FILE]

train: `ladder-jax train tiny` on data x tensor = 2 x 2 simulated devices, from the command line
until the first training step's program is called, whose tracing is included. generate: `ladder-jax
generate CHECKPOINT --prompt TEXT`, from the command line to its end. Each command is run in a fresh
process.

--list prints the files in the order of their first calls, with their functions.
"""

import importlib.util
import inspect
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from types import CodeType

from experiments import study

HERE = pathlib.Path(__file__).resolve().parent
TEXT = "".join(
    f"line {n}: the ladder has {n % 7} rungs, and {n % 5} of them are new\n" for n in range(4000)
)
DEVICES = ("--cpu-devices", "4")


def main() -> None:
    parser = study.parser(__doc__, name="walk")
    parser.add_argument(
        "--list", action="store_true", help="print the files in order, with their functions"
    )
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json")
    args = parser.parse_args()
    # where the commands run; of other platforms jax would say what is missing
    os.environ["JAX_PLATFORMS"] = "cpu"
    rows = []
    for name in ("train", "generate"):
        with tempfile.TemporaryDirectory() as folder:
            files = walk(name, folder=pathlib.Path(folder))
        if args.list:
            print(f"{name}: {len(files)} files")
            print(
                "\n".join(
                    f"{n:4} {path}: {', '.join(names)}"
                    for n, (path, names) in enumerate(files.items(), 1)
                )
            )
        rows.append({"walk": name, "files": len(files), "functions": sum(map(len, files.values()))})
        print(json.dumps(rows[-1]))
    study.keep({**study.environment(), "rows": rows}, file=args.out)


def walk(name: str, *, folder: pathlib.Path) -> dict[str, list[str]]:
    """By path below ladder_jax the functions, in the order of their first calls."""
    text = folder / "text.txt"
    run = folder / "run"
    result = folder / "result.json"
    text.write_text(TEXT, encoding="utf-8")
    training = [
        "train",
        "tiny",
        *DEVICES,
        "mesh.data=2",
        "mesh.tensor=2",
        f"data.path={text}",
        f"run.dir={run}",
    ]
    training.append("train.steps=2")
    if name == "generate":
        finish("ladder_jax", *training)
        words = ["generate", str(run), *DEVICES, "--prompt", "line ", "--max-new-tokens", "8"]
    finish("experiments.walk", TRACED, str(result), *(training if name == "train" else words))
    return json.loads(result.read_text(encoding="utf-8"))


def finish(module: str, *words: str) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"
    }
    environment["PYTHONPATH"] = str(HERE.parents[1])
    done = subprocess.run(
        [sys.executable, "-m", module, *words], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(
            f"{module} {' '.join(words)} ended with status {done.returncode}:\n{done.stderr[-4000:]}"
        )


# The process that runs a command, and notes which functions it calls.

TRACED = "--traced"
TOOL = sys.monitoring.PROFILER_ID
EVENT = sys.monitoring.events.PY_START


class Walk:
    """The library's functions in the order of their first calls."""

    def __init__(self, result: pathlib.Path):
        library = pathlib.Path(importlib.util.find_spec("ladder_jax").origin).parent
        self._library, self._result = f"{library}{os.sep}", result
        self._optimizer_traced = False
        self._functions: dict[CodeType, None] = {}
        sys.monitoring.use_tool_id(TOOL, "walk")
        sys.monitoring.register_callback(TOOL, EVENT, self._enter)
        sys.monitoring.set_events(TOOL, EVENT)

    def end(self) -> None:
        """Writes the record, and ends the process."""
        files: dict[str, list[str]] = {}
        for code in list(self._functions):
            name = code.co_filename.removeprefix(self._library)
            files.setdefault(name, []).append(code.co_qualname.replace("<locals>.", ""))
        self._result.write_text(json.dumps(files), encoding="utf-8")
        os._exit(0)

    def _enter(self, code: CodeType, offset: int) -> object:
        if code.co_filename.startswith(self._library):
            if not code.co_flags & inspect.CO_OPTIMIZED or code.co_name.startswith("<"):
                # the body of a module or a class; a lambda or a generator expression
                return sys.monitoring.DISABLE
            if not self._imports():
                self._functions.setdefault(code)
            return None
        if code.co_qualname == "scale_by_adam.<locals>.update_fn":
            self._optimizer_traced = True
        elif self._optimizer_traced and code.co_qualname == "Compiled.__call__":
            self.end()
        return None if code.co_qualname == "Compiled.__call__" else sys.monitoring.DISABLE

    def _imports(self) -> bool:
        """Whether a module of the library is being imported on this thread."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(
                self._library
            ):
                return True
            frame = frame.f_back
        return False


def trace(result: str, *words: str) -> None:
    """One command of ladder-jax, in this process, which ends where the walk does."""
    walk = Walk(pathlib.Path(result))
    from ladder_jax.cli import main as ladder_jax

    if status := ladder_jax(list(words)):
        sys.exit(status)
    walk.end()


if __name__ == "__main__":
    if sys.argv[1:2] == [TRACED]:
        trace(*sys.argv[2:])
    main()
