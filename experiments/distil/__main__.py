"""Refit, then retrain: what is left of a conversion's loss at matched shares of the pretraining budget, with controls.

    python -m experiments.distil --text FILE [--text FILE ...] [--size full] [path.to.field=value ...] [--rows N]

On one device. What was killed goes on where it stood: pretraining and retraining resume, measured rows are kept. After
each row SIZE.json is written anew; --tables makes the README's tables and the figures from those files alone.
"""

import argparse
import pathlib
import sys

from experiments import command
from experiments.distil import plan, tables

HERE = pathlib.Path(__file__).parent


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.distil", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="path.to.field=value", help="settings that replace SIZE.yaml's")
    parser.add_argument("--size", default="small", metavar="SIZE", help="small (the default) or full")
    parser.add_argument(
        "--text", action="append", default=[], metavar="FILE", help="text, or JSON lines; may be given again"
    )
    parser.add_argument("--python", metavar="FOLDER", help="of Python source (default: the standard library)")
    parser.add_argument("--rows", type=int, metavar="N", help="only the first N of plan.py's rows")
    parser.add_argument("--runs", type=pathlib.Path, metavar="DIR", help="default runs/distil/SIZE")
    parser.add_argument("--out", type=pathlib.Path, default=HERE, metavar="DIR", help="of SIZE.json and the figures")
    parser.add_argument("--tables", action="store_true", help="no runs: tables and figures from SIZE.json")
    args = parser.parse_intermixed_args(argv)

    def work() -> None:
        if not args.tables:
            study(args)
        tables.write(args.out)

    return command.ended(work, name="distil")


def study(args: argparse.Namespace) -> None:
    from ladder_jax import cli

    cli.prepare_devices(None)
    from experiments.distil import texts
    from experiments.distil.measured import Study
    from ladder_jax import config
    from ladder_jax.errors import UserError

    size = plan.check(args.size)
    if not args.text:
        raise UserError("name a text: --text FILE is missing")
    recipe = str(HERE / f"{size}.yaml")
    base = config.load(recipe, overrides=args.overrides)
    runs = (args.runs or pathlib.Path("runs/distil") / size).expanduser().absolute()
    share = max(plan.SHARES) / 100
    corpus = texts.prepare(base, texts=args.text, python=args.python, share=share, folder=runs / "texts")
    study_of = Study(recipe, tuple(args.overrides), base, corpus, runs)
    rows, done = plan.rows()[: args.rows], []
    args.out.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows, start=1):
        print(f"[{number}/{len(rows)}] seed {row.seed}: {row.name}", flush=True)
        done.append(study_of.row_once(row))
        print(f"  {done[-1]['loss']:.4f}", flush=True)
        study_of.report(done, file=args.out / f"{size}.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
