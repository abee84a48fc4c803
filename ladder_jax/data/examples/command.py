"""The verb `split`."""

import pathlib
import re

from ladder_jax.data.examples import stages
from ladder_jax.errors import UserError
from ladder_jax.files import write_atomically


def run(args: dict) -> None:
    """Writes the stages, and prints how many records each has. Raises UserError; then nothing has been written."""
    names = args["stages"].split(",")
    if not all(re.fullmatch(r"[\w-]+", name) for name in names) or len(set(names)) != len(names):
        raise UserError(
            f"--stages {args['stages']}: not different names of letters, digits, _ and -, such as easy,hard"
        )
    if len(names) < 2:
        raise UserError(f"--stages {args['stages']}: one stage is no order; name two or more")
    at = None if args["at"] is None else _bounds(args["at"], stages=len(names))
    out = pathlib.Path(args["out"]).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {str(out)!r} exists and is not an empty folder")
    settings = dict(score=args["by"], names=names, at=at, descending=args["descending"])
    parts = stages.split(pathlib.Path(args["source"]).expanduser(), **settings)
    out.mkdir(parents=True, exist_ok=True)
    listed = "stages:\n" + "".join(f"- {name}.jsonl\n" for name in parts)
    contents = {f"{name}.jsonl": "".join(lines) for name, lines in parts.items()} | {stages.FILE: listed}
    for name, content in contents.items():  # the list last: it stands for the others
        write = lambda path, content=content: pathlib.Path(path).write_text(content, encoding="utf-8")
        write_atomically(str(out / name), write)
    counts = ", ".join(f"{name} {len(lines):,}" for name, lines in parts.items())
    print(f"{out / stages.FILE}: {counts}; train on it with data.format=examples")


def _bounds(text: str, *, stages: int) -> list[float]:
    try:
        at = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--at {text}: not numbers, such as 0.3,0.7") from None
    if len(at) != stages - 1 or any(a >= b for a, b in zip(at, at[1:])):
        raise UserError(f"--at {text}: {stages} stages have {stages - 1} ascending scores between them")
    return at
