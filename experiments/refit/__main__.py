"""How much of what a conversion to ladder layers loses does a refit give back? On SmolLM2-135M-Instruct.

    python -m experiments.refit --wikitext FILE --gsm8k FILE --shakespeare FILE [--rows N]

On one device, in float32. Each measured row is kept in results.json; the same command goes on with the others.
--tables makes the README's tables and the figure anew from results.json alone.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

from experiments import command, measure
from experiments.refit import plan, tables
from ladder_jax import files
from ladder_jax.errors import UserError

HERE = pathlib.Path(__file__).parent


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.refit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wikitext", metavar="FILE", help="a split of WikiText-2")
    parser.add_argument("--gsm8k", metavar="FILE", help="GSM8K's JSON lines, each with question and answer")
    parser.add_argument("--shakespeare", metavar="FILE", help="tinyshakespeare, say")
    parser.add_argument("--python", metavar="FOLDER", help="of Python source (default: the standard library)")
    parser.add_argument("--source", metavar="PATH", help="another model: what `ladder-jax convert` takes")
    parser.add_argument("--rows", type=int, metavar="N", help="only the first N of plan.py's rows")
    parser.add_argument("--out", type=pathlib.Path, default=HERE, metavar="DIR", help="of results.json and the rest")
    parser.add_argument("--tables", action="store_true", help="no measurements: tables and figure from results.json")
    args = parser.parse_args(argv)

    def work() -> None:
        if not args.tables:
            study(args)
        tables.write(args.out)

    return command.ended(work, name="refit")


def study(args: argparse.Namespace) -> None:
    from ladder_jax import cli

    cli.prepare_devices(None)
    from experiments.convert_smollm2 import prepare
    from experiments.refit import measured, texts
    from ladder_jax import pretrained
    from ladder_jax.config import Dtype
    from ladder_jax.pretrained.convert import calibrated

    if missing := [name for name in plan.DOMAINS[:-1] if getattr(args, name) is None]:
        raise UserError(f"name the texts: --{missing[0]} FILE is missing")
    opened = pretrained.open(args.source or prepare.source())
    model = dataclasses.replace(opened.model, dtype=Dtype.FLOAT32, residual_dtype=Dtype.FLOAT32)
    source = dataclasses.replace(opened, model=model)
    loaded = texts.load({name: getattr(args, name) for name in plan.DOMAINS}, tokenizer=calibrated.tokenizer_of(source))
    files_of = {name: pathlib.Path(getattr(args, name) or "the standard library").name for name in plan.DOMAINS}
    about = {**measure.environment(), "command": "python -m experiments.refit", "texts": files_of}
    file = args.out / "results.json"
    args.out.mkdir(parents=True, exist_ok=True)
    done = json.loads(file.read_text())["rows"] if file.is_file() else []
    study_of, rows = measured.Study(source, loaded), plan.rows()[: args.rows]
    for number, row in enumerate(rows, start=1):
        if any(row.asked.items() <= one.items() for one in done):
            continue
        print(f"[{number}/{len(rows)}] {row.asked}", flush=True)
        done.append(study_of.measure(row))
        print({name: round(value, 3) for name, value in done[-1]["losses"].items()}, flush=True)
        content = json.dumps({**about, "held_out_tokens": texts.HELD_OUT, "rows": done}, indent=1)
        files.write_atomically(str(file), lambda path, content=content: pathlib.Path(path).write_text(content + "\n"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
