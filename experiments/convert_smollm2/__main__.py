"""The paper's conversion table on a real model: SmolLM2-135M-Instruct, whose layers are turned to ladder layers.

    python -m experiments.convert_smollm2 data.path=TEXT [path.to.field=value ...] [--size full]

On one device. What was killed goes on where it stood: measured arms are kept, an unfinished one resumes. At the end
come results.json, the README's tables and the figures; --tables makes those two anew from results.json alone.
"""

import argparse
import pathlib
import sys

from experiments import command
from experiments.convert_smollm2 import plan, tables

HERE = pathlib.Path(__file__).parent


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.convert_smollm2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="path.to.field=value", help="settings that replace SIZE.yaml's")
    parser.add_argument("--size", default="small", metavar="SIZE", help="small (the default) or full")
    parser.add_argument("--source", metavar="PATH", help="another model: what `ladder-jax convert` takes")
    parser.add_argument("--questions", metavar="FILE", help="GSM8K's JSON lines: the last of them are to be answered")
    parser.add_argument("--arms", metavar="NAME[,NAME]", help="only these (default: all of the size's)")
    parser.add_argument("--runs", type=pathlib.Path, metavar="DIR", help="default runs/convert_smollm2/SIZE")
    parser.add_argument("--out", type=pathlib.Path, default=HERE, metavar="DIR", help="of results.json and the rest")
    parser.add_argument("--tables", action="store_true", help="no runs: tables and figures from results.json")
    args = parser.parse_intermixed_args(argv)

    def work() -> None:
        if not args.tables:
            study(args)
        tables.write(args.out)

    return command.ended(work, name="convert_smollm2")


def study(args: argparse.Namespace) -> None:
    from ladder_jax import cli

    cli.prepare_devices(None)
    from experiments.convert_smollm2 import measured, prepare
    from ladder_jax import evaluate
    from ladder_jax.evaluate import tasks

    size = plan.size(args.size)
    tasks.library()  # refused now, and not after an arm's training
    if args.questions:
        evaluate.read_questions(args.questions)
    folder = (args.runs or pathlib.Path("runs/convert_smollm2") / size.name).expanduser().absolute()
    ready = prepare.prepare(size, overrides=args.overrides, folder=folder, source=args.source or prepare.source())
    every = plan.arms(size, num_layers=ready.config.model.num_layers)
    only = args.arms.split(",") if args.arms else ()
    wanted = plan.arms(size, num_layers=ready.config.model.num_layers, only=only)
    seeds = lambda arm: range(1 if arm.way is plan.Way.NONE else size.seeds)
    runs = [(arm, seed) for seed in range(size.seeds) for arm in wanted if seed in seeds(arm)]
    args.out.mkdir(parents=True, exist_ok=True)
    for number, (arm, seed) in enumerate(runs, start=1):
        print(f"[{number}/{len(runs)}] {arm.name}, seed {seed}", flush=True)
        measured.arm_once(arm, ready, seed=seed, questions=args.questions)
        measured.report(every, ready, questions=args.questions, file=args.out / "results.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
