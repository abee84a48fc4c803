"""The small study: six topologies of one small shape, at equal tokens and at equal predicted time,
over seeds.

    python -m experiments.pretrain data.path=wiki.valid.raw [path.to.field=value ...]

On one device. What was killed goes on where it stood: finished runs are kept, an unfinished one
resumes. At the end come results.json and the README's table; --tables makes it anew from
results.json alone.
"""

import argparse
import functools
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from experiments import study
from ladder_jax import config
from ladder_jax.config import RunConfig
from ladder_jax.errors import UserError, unknown
from ladder_jax.predict import machine, model as speeds
from ladder_jax.predict.program import PLAIN
from ladder_jax.predict.work import Model, Task

HERE = pathlib.Path(__file__).parent
TOPOLOGIES = ("standard", "parallel", "ladder", "ladder-2", "ladder-fresh", "parallel-ladder")
RANKS, SHAPE, MACHINE = 8, "ladder-1b", "h100-nvlink"  # of the predicted time


def main(argv: list[str]) -> int:
    parser = study.parser(__doc__, name="pretrain")
    study.add_overrides(parser, of="study.yaml's")
    parser.add_argument(
        "--runs", type=pathlib.Path, default=pathlib.Path("runs/pretrain"), metavar="DIR"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=HERE, metavar="DIR", help="of results.json and the rest"
    )
    parser.add_argument("--topologies", default=",".join(TOPOLOGIES), metavar="NAME[,NAME]")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument(
        "--tables", action="store_true", help="no runs: the table, from results.json"
    )
    args = parser.parse_intermixed_args(argv)

    def work() -> None:
        if not args.tables:
            measure(args)
        results = study.load(args.out / "results.json")
        study.show(tables(results), folder=args.out)

    return study.ended(work, name="pretrain")


# The runs.


def runs(
    *,
    folder: pathlib.Path,
    overrides: list[str],
    seeds: int,
    topologies: Sequence[str] = TOPOLOGIES,
) -> list[RunConfig]:
    """In the order in which they are made: what is killed half-way has compared all topologies on
    fewer seeds.

    Standard is always among them. Raises UserError for other topologies than TOPOLOGIES.
    """
    if seeds < 1:
        raise UserError(f"--seeds must be positive, not {seeds}")
    for residual in topologies:
        if residual not in TOPOLOGIES:
            raise unknown("topology of the study", residual, TOPOLOGIES)
    recipe = str(HERE / "study.yaml")
    train = config.load(recipe, overrides=overrides).train
    every = train.evaluate_every or train.steps
    found = []
    for seed, residual in itertools.product(range(seeds), TOPOLOGIES):
        if residual in ("standard", *topologies):
            # As many steps as fit into the predicted time of Standard's, up to the next
            # measurement.
            steps = max(train.steps, math.ceil(train.steps * predicted(residual) / every) * every)
            changed = [f"model.residual={residual}", f"train.seed={seed}", f"train.steps={steps}"]
            changed.append(f"run.dir={folder / residual / f'seed-{seed}'}")
            if residual == "ladder-fresh":
                changed.append(f"model.ranks={RANKS}")
            found.append(config.load(recipe, overrides=[*overrides, *changed]))
    return found


@functools.cache
def predicted(residual: str) -> float:
    """How many times as fast as Standard's a training step is: one microbatch of SHAPE over RANKS
    devices of MACHINE.

    In the plain form: the whole stream on every rank, and ring all-reduces.
    """

    def seconds(residual: str) -> float:
        ranks = RANKS if residual == "ladder-fresh" else None
        model = config.preset(SHAPE, residual=residual, ranks=ranks)
        shard = Model(model, RANKS, trains=True)
        block = shard.prefill(rows=4, prompt_length=2048)
        task = Task(shard, machine.load(MACHINE), block)
        return speeds.run_by(task, PLAIN).seconds

    return seconds("standard") / seconds(residual)


def measure(args: argparse.Namespace) -> None:
    """Makes the runs that are not there, and results.json of all."""
    from ladder_jax import cli

    cli.prepare_devices(None)
    from ladder_jax import train
    from ladder_jax.train import folder

    topologies = args.topologies.split(",")
    asked = runs(
        folder=args.runs, overrides=args.overrides, seeds=args.seeds, topologies=topologies
    )
    for number, run in enumerate(asked, start=1):
        print(f"[{number}/{len(asked)}] {run.model.residual}, seed {run.train.seed}", flush=True)
        place = folder.path_of(run)
        folder.check(train.resolve(run), place)
        if not (place / folder.RESULT).is_file():
            train.run(run)
    standard = asked[0]
    entropy = json.loads((folder.path_of(standard) / folder.RESULT).read_text())["bigram_entropy"]
    about = {
        **study.environment(),
        "text": pathlib.Path(standard.data.path).name,
        "bigram_entropy": entropy,
        "of_standard": standard.train.steps,
        "tokens_a_step": standard.train.batch * standard.train.sequence,
        "model": config.to_dict(standard.model),
        "train": config.to_dict(standard.train),
    }
    of_study = {"shape": SHAPE, "machine": MACHINE}
    times = [
        {**of_study, "residual": residual, "speedup": predicted(residual)}
        for residual in TOPOLOGIES
    ]
    results = {**about, "predicted": times, "runs": [row(run) for run in asked]}
    study.keep(results, file=args.out / "results.json")


def row(run: RunConfig) -> dict:
    from ladder_jax.train import folder, metrics

    place = folder.path_of(run)
    rows, read = metrics.read(place), lambda name: json.loads((place / name).read_text())
    return {
        "residual": run.model.residual,
        "seed": run.train.seed,
        "steps": run.train.steps,
        "parameters": read(folder.RESULT)["parameters"],
        "wall_seconds": read(folder.GOODPUT)["wall_seconds"],
        "held_out": [
            [row["step"], row["validation_loss"]] for row in rows if "validation_loss" in row
        ],
        "training": [[row["step"], row["loss"]] for row in rows],
    }


# What the results say.


def of(results: dict, residual: str) -> dict[int, dict]:
    """The runs of a topology, by seed."""
    return {run["seed"]: run for run in results["runs"] if run["residual"] == residual}


def speedup(results: dict, residual: str) -> float:
    """Of the predicted step, over Standard's."""
    asked = dict(shape=SHAPE, machine=MACHINE, residual=residual).items()
    return next(row["speedup"] for row in results["predicted"] if asked <= row.items())


def loss_at(run: dict, step: float) -> float:
    """The held-out loss at a step, between two measurements on the line that joins them.

    Raises ValueError for a step that the run did not reach, or that is before the first
    measurement.
    """
    steps, losses = zip(*run["held_out"])
    if not steps[0] <= step <= steps[-1]:
        raise ValueError(
            f"step {step} is not within the measurements of steps {steps[0]} to {steps[-1]}"
        )
    return float(np.interp(step, steps, losses))


def less_standard(results: dict, residual: str, *, at: float) -> list[float]:
    """The loss at step `at` less Standard's at its last one, over the seeds that both have.

    Runs of a seed have the same batches, and the same initial values where their parameters are the
    same.
    """
    standard = of(results, "standard")
    own = of(results, residual)
    last = {seed: loss_at(run, results["of_standard"]) for seed, run in standard.items()}
    return [loss_at(run, at) - last[seed] for seed, run in own.items() if seed in last]


def tables(results: dict) -> dict[str, str]:
    """The README's, in Markdown."""
    end = results["of_standard"]
    rows = []

    def cells(residual: str, step: float) -> list[str]:
        losses = [loss_at(run, step) for run in of(results, residual).values()]
        return [study.spread(losses), study.difference(less_standard(results, residual, at=step))]

    for residual in TOPOLOGIES:
        if count := len(of(results, residual)):
            faster = speedup(results, residual)
            in_time = [f"{faster:.2f}", f"{end * faster:.0f}", *cells(residual, end * faster)]
            rows.append([residual, count, *cells(residual, end), *in_time])
    head = (
        f"topology | seeds | at {end} steps | less Standard | predicted steps/s, over Standard"
        " | steps in Standard's time | at that step | less Standard"
    )
    return {"equal": study.table(head, rows)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
