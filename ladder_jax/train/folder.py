"""A run's folder: config.json, metrics.jsonl, checkpoints/. What it allows when a run is resumed."""

import json
import os
import pathlib
from typing import Any

from ladder_jax.config import RunConfig, to_dict
from ladder_jax.errors import UserError

# What may change when a run is resumed: it moves where and how the same numbers are computed.
FREE = ("mesh.", "run.", "decode.", "train.loop", "train.remat", "train.log_every", "train.checkpoint_every",
        "train.keep_checkpoints", "train.evaluation_batches")  # fmt: skip


def path_of(config: RunConfig) -> pathlib.Path:
    return pathlib.Path(config.run.dir or pathlib.Path("runs") / config.run.name).expanduser().absolute()


def check(config: RunConfig, folder: pathlib.Path) -> None:
    """Raises UserError where `folder` belongs to a run of another configuration, or to something else."""
    file = folder / "config.json"
    if not file.is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"run.dir={str(folder)!r} is not empty and holds no config.json: not a run's folder")
        return
    try:
        before = _flat(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise UserError(f"{str(file)!r} cannot be read as JSON") from None
    after = _flat(to_dict(config))
    before = _flat(to_dict(RunConfig())) | before  # a setting that is newer than the run was at its default
    changed = [
        f"{key} was {before.get(key)!r}, now {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(FREE)
    ]
    if changed:
        raise UserError(
            f"{str(folder)!r} holds a run of another configuration ({'; '.join(changed)}):"
            " change it back, or choose another run.dir"
        )


def describe(config: RunConfig) -> str:
    """The resolved configuration, a line a section."""
    sections = ((name, _flat(section)) for name, section in to_dict(config).items())
    return "\n".join(f"{name}: {' '.join(f'{k}={v}' for k, v in flat.items())}" for name, flat in sections)


def write_config(config: RunConfig, folder: pathlib.Path) -> None:
    write_atomically(folder / "config.json", json.dumps(to_dict(config), indent=2) + "\n")


def read_metrics(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The logged steps. A last line that a kill cut short is left out."""
    file = folder / "metrics.jsonl"
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def rewind_metrics(folder: pathlib.Path, *, step: int) -> None:
    """Drop what was logged after `step`: those steps are about to be made again."""
    rows = [row for row in read_metrics(folder) if row["step"] <= step]
    write_atomically(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def append_metrics(folder: pathlib.Path, row: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def write_atomically(file: pathlib.Path, text: str) -> None:
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    return {key: value for name, below in tree.items() for key, value in _flat(below, f"{prefix}{name}.").items()}
