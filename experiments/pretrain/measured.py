"""Makes a run of the study if it is not there yet, and reads what all of them left."""

import json
import pathlib

from experiments import measure
from experiments.pretrain import gradients, plan
from experiments.pretrain.plan import Run
from ladder_jax import config, files, train
from ladder_jax.train import folder, metrics


def train_once(run: Run) -> None:
    """Nothing is computed where the run's folder holds its result. Raises UserError where it is of other settings."""
    place = folder.path_of(run.config)
    folder.check(train.resolve(run.config), place)
    if not (place / "result.json").is_file():
        train.run(run.config, say=_say)
    if run.watched and not (place / gradients.NAME).is_file():
        gradients.measure(place)


def report(runs: list[Run], *, file: pathlib.Path) -> None:
    """`file` as JSON: the settings, the predicted times, and what the finished ones of `runs` measured."""
    finished = [run for run in runs if (folder.path_of(run.config) / "result.json").is_file()]
    base, environment = finished[0].config, measure.environment()
    del environment["command"]
    found = {
        **environment,
        "text": pathlib.Path(base.data.path).name,
        "bigram_entropy": _result(finished[0])["bigram_entropy"],
        "of_standard": base.train.steps,
        "tokens_a_step": base.train.batch * base.train.sequence,
        "model": config.to_dict(base.model),
        "train": config.to_dict(base.train),
        "predicted": predictions(),
        "runs": [_row(run) for run in finished],
    }
    write = lambda path: pathlib.Path(path).write_text(json.dumps(found, indent=1) + "\n")
    files.write_atomically(str(file), write)


def predictions() -> list[dict]:
    """Of each shape, machine and topology: seconds of a microbatch, its communication, and the speed over Standard."""
    rows = []
    for shape in ("ladder-1b", "ladder-3b"):
        for machine in plan.MACHINES:
            standard = plan.seconds("standard", shape=shape, name=machine)
            for residual in plan.TOPOLOGIES:
                step = plan.step(residual, shape=shape, name=machine)
                times = dict(seconds=step.seconds, wire_seconds=step.wire, exposed_seconds=step.exposed)
                named = dict(shape=shape, machine=machine, tensor=plan.RANKS, rows=plan.ROWS, sequence=plan.SEQUENCE)
                rows.append({**named, "residual": residual, **times, "speedup": standard / step.seconds})
    return rows


def _row(run: Run) -> dict:
    place = folder.path_of(run.config)
    rows = metrics.read(place)
    row = {
        "group": run.group,
        "residual": run.residual,
        "layers": run.layers,
        "norm": run.norm,
        "seed": run.seed,
        "steps": run.config.train.steps,
        "parameters": _result(run)["parameters"],
        "wall_seconds": json.loads((place / folder.GOODPUT).read_text())["wall_seconds"],
        "held_out": [[row["step"], row["validation_loss"]] for row in rows if "validation_loss" in row],
        "training": [[row["step"], row["loss"]] for row in rows],
    }
    if run.watched and (place / gradients.NAME).is_file():
        row["gradients"] = json.loads((place / gradients.NAME).read_text())["steps"]
    return row


def _result(run: Run) -> dict:
    return json.loads((folder.path_of(run.config) / "result.json").read_text())


def _say(line: str) -> None:
    if line.startswith(("step ", "resuming ", "goodput ")):
        print(f"    {line}", flush=True)
