"""The small study: six topologies of one small shape, equal tokens and equal predicted time, over seeds.

    python -m experiments.pretrain data.path=wiki.valid.raw [path.to.field=value ...]

On one device. What was killed goes on where it stood: finished runs are kept, an unfinished one resumes. At the end
come results.json, the README's tables and the figures; --tables makes those two anew from results.json alone.
"""

import argparse
import pathlib
import sys

from experiments import command
from experiments.pretrain import plan, tables

HERE = pathlib.Path(__file__).parent


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.pretrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="path.to.field=value", help="settings that replace study.yaml's"
    )
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/pretrain"), metavar="DIR")
    parser.add_argument("--out", type=pathlib.Path, default=HERE, metavar="DIR", help="of results.json and the rest")
    parser.add_argument("--topologies", default=",".join(plan.TOPOLOGIES), metavar="NAME[,NAME]")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--ablation-seeds", type=int, default=2, metavar="N", help="of depths and norms; 0 for none")
    parser.add_argument("--tables", action="store_true", help="no runs: tables and figure from results.json")
    args = parser.parse_intermixed_args(argv)

    def work() -> None:
        if not args.tables:
            study(args)
        tables.write(args.out)

    return command.ended(work, name="pretrain")


def study(args: argparse.Namespace) -> None:
    from ladder_jax import cli

    cli.prepare_devices(None)
    from experiments.pretrain import measured

    asked = dict(seeds=args.seeds, ablation_seeds=args.ablation_seeds, topologies=args.topologies.split(","))
    runs = plan.runs(folder=args.runs, overrides=args.overrides, **asked)
    for number, run in enumerate(runs, start=1):
        print(f"[{number}/{len(runs)}] {run.group}: {run.name}", flush=True)
        measured.train_once(run)
    args.out.mkdir(parents=True, exist_ok=True)
    measured.report(runs, file=args.out / "results.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
