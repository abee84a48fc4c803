"""The small study: six topologies of one small shape, at equal tokens and at equal predicted time, over seeds.

    python -m experiments.pretrain data.path=wiki.valid.raw [path.to.field=value ...]

On one device. What was killed goes on where it stood: finished runs are kept, an unfinished one resumes. At the end
come results.json, the README's tables and the figure; --tables makes those two anew from results.json alone.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Sequence

from experiments import study
from experiments.study import Spread
from ladder_jax import config, files, pyplot
from ladder_jax.config import RunConfig
from ladder_jax.errors import UserError, unknown
from ladder_jax.predict import machine
from ladder_jax.predict import model as speeds
from ladder_jax.predict.picture import COLOURS

HERE = pathlib.Path(__file__).parent
TOPOLOGIES = ("standard", "parallel", "ladder", "ladder-2", "ladder-fresh", "parallel-ladder")
RANKS, SHAPE, MACHINE = 8, "ladder-1b", "h100-nvlink"  # of the predicted time
INK = {**COLOURS, "standard": "#4d4d4d", "ladder-2": "#b279a2", "ladder-fresh": "#e45756"}  # bands must be told apart


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.pretrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="path.to.field=value", help="settings that replace study.yaml's"
    )
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/pretrain"), metavar="DIR")
    parser.add_argument("--out", type=pathlib.Path, default=HERE, metavar="DIR", help="of results.json and the rest")
    parser.add_argument("--topologies", default=",".join(TOPOLOGIES), metavar="NAME[,NAME]")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--tables", action="store_true", help="no runs: tables and figure from results.json")
    args = parser.parse_intermixed_args(argv)

    def work() -> None:
        if not args.tables:
            measure(args)
        results = study.load(args.out / "results.json")
        study.show(tables(results), folder=args.out)
        plot(results, file=str(args.out / "study.png"))

    return study.ended(work, name="pretrain")


# The runs.


@dataclasses.dataclass(frozen=True)
class Run:
    residual: str
    seed: int
    config: RunConfig


def runs(
    *, folder: pathlib.Path, overrides: list[str], seeds: int, topologies: Sequence[str] = TOPOLOGIES
) -> list[Run]:
    """In the order in which they are made: what is killed half-way has compared all topologies on fewer seeds.

    Standard is always among them. Raises UserError for other topologies than TOPOLOGIES.
    """
    if seeds < 1:
        raise UserError(f"--seeds must be positive, not {seeds}")
    for residual in topologies:
        if residual not in TOPOLOGIES:
            raise unknown("topology of the study", residual, TOPOLOGIES)
    recipe = str(HERE / "study.yaml")
    train = config.load(recipe, overrides=overrides).train
    found = []
    for seed in range(seeds):
        for residual in TOPOLOGIES:
            if residual not in ("standard", *topologies):
                continue
            steps = in_standards_time(residual, steps=train.steps, every=train.evaluate_every or train.steps)
            changed = [f"model.residual={residual}", f"train.seed={seed}", f"train.steps={steps}"]
            changed.append(f"run.dir={folder / residual / f'seed-{seed}'}")
            if residual == "ladder-fresh":
                changed.append(f"model.ranks={RANKS}")
            found.append(Run(residual, seed, config.load(recipe, overrides=[*overrides, *changed])))
    return found


def in_standards_time(residual: str, *, steps: int, every: int) -> int:
    """As many steps as fit into the predicted time of `steps` of Standard, up to the next measurement."""
    faster = predicted("standard") / predicted(residual)
    return max(steps, math.ceil(steps * faster / every) * every)


def predicted(residual: str) -> float:
    """Seconds of the step of one microbatch of SHAPE over RANKS devices of MACHINE.

    In the plain form: the whole stream on every rank, and ring all-reduces.
    """
    changes = {"ranks": RANKS} if residual == "ladder-fresh" else {}
    model = config.preset(SHAPE, residual=residual, **changes)
    return speeds.training_step(model, machine=machine.load(MACHINE), tensor=RANKS, rows=4, sequence=2048).seconds


def measure(args: argparse.Namespace) -> None:
    """Makes the runs that are not there, and results.json of all."""
    from ladder_jax import cli

    cli.prepare_devices(None)
    from ladder_jax import train
    from ladder_jax.train import folder

    topologies = args.topologies.split(",")
    asked = runs(folder=args.runs, overrides=args.overrides, seeds=args.seeds, topologies=topologies)
    for number, run in enumerate(asked, start=1):
        print(f"[{number}/{len(asked)}] {run.residual}, seed {run.seed}", flush=True)
        place = folder.path_of(run.config)
        folder.check(train.resolve(run.config), place)
        if not (place / folder.RESULT).is_file():
            train.run(run.config, say=say)
    standard = asked[0].config
    about = {
        **study.environment(),
        "text": pathlib.Path(standard.data.path).name,
        "bigram_entropy": read(asked[0], folder.RESULT)["bigram_entropy"],
        "of_standard": standard.train.steps,
        "tokens_a_step": standard.train.batch * standard.train.sequence,
        "model": config.to_dict(standard.model),
        "train": config.to_dict(standard.train),
    }
    times = []
    for residual in TOPOLOGIES:
        speedup = predicted("standard") / predicted(residual)
        times.append({"shape": SHAPE, "machine": MACHINE, "residual": residual, "speedup": speedup})
    results = {**about, "predicted": times, "runs": [row(run) for run in asked]}
    study.keep(results, file=args.out / "results.json")


def say(line: str) -> None:
    if line.startswith(("step ", "resuming ", "goodput ")):
        print(f"    {line}", flush=True)


def read(run: Run, name: str) -> dict:
    from ladder_jax.train import folder

    return json.loads((folder.path_of(run.config) / name).read_text())


def row(run: Run) -> dict:
    from ladder_jax.train import folder, metrics

    rows = metrics.read(folder.path_of(run.config))
    return {
        "residual": run.residual,
        "seed": run.seed,
        "steps": run.config.train.steps,
        "parameters": read(run, folder.RESULT)["parameters"],
        "wall_seconds": read(run, folder.GOODPUT)["wall_seconds"],
        "held_out": [[row["step"], row["validation_loss"]] for row in rows if "validation_loss" in row],
        "training": [[row["step"], row["loss"]] for row in rows],
    }


# What the results say.


def of(results: dict, residual: str) -> dict[int, dict]:
    """The runs of a topology, by seed."""
    return {run["seed"]: run for run in results["runs"] if run["residual"] == residual}


def speedup(results: dict, residual: str) -> float:
    """Of the predicted step, over Standard's."""
    asked = dict(shape=SHAPE, machine=MACHINE, residual=residual).items()
    (found,) = (row["speedup"] for row in results["predicted"] if asked <= row.items())
    return found


def loss_at(run: dict, step: float) -> float:
    """The held-out loss at a step, between two measurements on the line that joins them.

    Raises ValueError for a step that the run did not reach, or that is before the first measurement.
    """
    import numpy as np

    steps, losses = zip(*run["held_out"])
    if not steps[0] <= step <= steps[-1]:
        raise ValueError(f"step {step} is not within the measurements of steps {steps[0]} to {steps[-1]}")
    return float(np.interp(step, steps, losses))


def less_standard(results: dict, residual: str, *, at: float) -> Spread:
    """The loss at step `at` less Standard's at its last one, over the seeds that both have.

    Runs of a seed have the same batches, and the same initial values where their parameters are the same.
    """
    standard = of(results, "standard")
    gaps = [
        loss_at(run, at) - loss_at(standard[seed], results["of_standard"])
        for seed, run in of(results, residual).items()
        if seed in standard
    ]
    return Spread(tuple(gaps))


def tables(results: dict) -> dict[str, str]:
    """The README's, in Markdown."""
    end, rows = results["of_standard"], []
    for residual in TOPOLOGIES:
        own = of(results, residual).values()
        if not own:
            continue
        faster = speedup(results, residual)
        cells = [residual, len(own)]
        for before, step in (([], end), ([f"{faster:.2f}", f"{end * faster:.0f}"], end * faster)):
            losses = Spread(tuple(loss_at(run, step) for run in own))
            cells += [*before, losses, less_standard(results, residual, at=step).as_difference]
        rows.append(cells)
    head = (
        f"topology | seeds | at {end} steps | less Standard | predicted steps/s, over Standard"
        " | steps in Standard's time | at that step | less Standard"
    )
    return {"equal": study.table(head, rows)}


def plot(results: dict, *, file: str) -> None:
    """Held-out loss over tokens and over predicted time. Lines: means over the seeds; bands: from least to greatest."""
    plt = pyplot.load()
    figure, (tokens, time, gap) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    end = results["of_standard"]
    lowest = min(loss for run in results["runs"] for _, loss in run["held_out"])
    for residual in TOPOLOGIES:
        own = of(results, residual)
        if not own:
            continue
        steps = [step for step, _ in next(iter(own.values()))["held_out"]]
        shared = [step for step in steps if step <= end]
        thousands = [step * results["tokens_a_step"] / 1e3 for step in steps]
        parts = [step / speedup(results, residual) / end for step in steps]
        losses = [[loss for _, loss in run["held_out"]] for run in own.values()]
        standard = of(results, "standard")
        gaps = [
            [loss_at(run, step) - loss_at(standard[seed], step) for step in shared]
            for seed, run in own.items()
            if seed in standard
        ]
        band(tokens, thousands, losses, residual)
        band(time, parts, losses, residual)
        band(gap, thousands[: len(shared)], gaps, residual)
    for axis in (tokens, time):  # the first measurements are far above what is to be told apart
        axis.set_ylim(lowest - 0.03, lowest + 0.55)
    tokens.set(xlabel="thousand bytes trained on", ylabel="held-out loss, nats a byte", title="equal tokens")
    time.set(
        xlabel="predicted time, Standard's run = 1",
        title=f"equal predicted time: {SHAPE}, TP {RANKS}, {MACHINE}",
    )
    time.axvline(1, color="#999999", lw=0.8, ls=":")
    gap.set(
        xlabel="thousand bytes trained on", ylabel="less Standard of the same seed", title="equal tokens, difference"
    )
    gap.axhline(0, color="#999999", lw=0.8)
    tokens.legend(fontsize=8.5, frameon=False)
    files.write_atomically(file, lambda path: figure.savefig(path, dpi=130))
    plt.close(figure)


def band(axis, places: list[float], values: list[list[float]], residual: str) -> None:
    """values: a line a seed."""
    if not values:
        return
    by_place = list(zip(*values))
    mean = [sum(column) / len(column) for column in by_place]
    axis.plot(places, mean, color=INK[residual], lw=1.6, label=residual)
    axis.fill_between(places, list(map(min, by_place)), list(map(max, by_place)), color=INK[residual], alpha=0.18, lw=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
