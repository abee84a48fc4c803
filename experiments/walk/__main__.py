"""How many files of the library one command passes through: what a newcomer opens to follow it.

    python -m experiments.walk [train] [generate] [--list] [--library CHECKOUT] [--out FILE]

train: `ladder-jax train tiny` on data x tensor = 2 x 2 simulated devices, from the command line until the first
training step's program is called, whose tracing is included. generate: `ladder-jax generate CHECKPOINT --prompt TEXT`,
from the command line to the printed text. Each command is run in a fresh process (see trace.py).

--list prints the files in the order of their first calls, with their functions. --library walks another checkout.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from experiments import study

HERE = pathlib.Path(__file__).resolve().parent
TEXT = "".join(f"line {n}: the ladder has {n % 7} rungs, and {n % 5} of them are new\n" for n in range(4000))
DEVICES = ("--cpu-devices", "4")
MESH = ("mesh.data=2", "mesh.tensor=2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walks", nargs="*", metavar="train|generate", help="default: both")
    parser.add_argument("--list", action="store_true", help="print the files in order, with their functions")
    parser.add_argument("--library", type=pathlib.Path, default=HERE.parents[1], help="the checkout to walk through")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json")
    args = parser.parse_args()
    if unknown := set(args.walks) - {"train", "generate"}:
        parser.error(f"no such walk: {', '.join(sorted(unknown))}")
    walks = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.walks or ("train", "generate"):
            walks[name] = walk(name, folder=pathlib.Path(folder), library=args.library.resolve())
    rows = []
    for name, found in walks.items():
        if args.list:
            print(as_text(name, found))
        functions = sum(map(len, found["files"].values()))
        rows.append({"walk": name, "files": len(found["files"]), "functions": functions, "depth": found["depth"]})
        print(json.dumps(rows[-1]))
    study.keep({**study.environment(), "rows": rows}, file=args.out)


def walk(name: str, *, folder: pathlib.Path, library: pathlib.Path) -> dict:
    """{"depth": N, "files": {path below ladder_jax: [functions in the order of their first calls]}}."""
    text, run, result = folder / "text.txt", folder / "run", folder / f"{name}.json"
    text.write_text(TEXT, encoding="utf-8")
    training = ["train", "tiny", *DEVICES, *MESH, f"data.path={text}", f"run.dir={run}", "train.steps=2"]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment["PYTHONPATH"] = str(library)
    if name == "train":
        words = training
    else:
        _run([sys.executable, "-m", "ladder_jax", *training], environment)
        words = ["generate", str(run), *DEVICES, "--prompt", "line ", "--max-new-tokens", "8"]
    _run([sys.executable, str(HERE / "trace.py"), words[0], str(result), *words[1:]], environment)
    return json.loads(result.read_text(encoding="utf-8"))


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-4000:]}")


def as_text(name: str, found: dict) -> str:
    lines = [f"{name}: {len(found['files'])} files, depth {found['depth']}"]
    lines += [f"{n:4} {path}: {', '.join(names)}" for n, (path, names) in enumerate(found["files"].items(), 1)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
