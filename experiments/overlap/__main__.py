"""How much of the communication is hidden: every target, phase and loop; Ladder, Standard and none at all.

    python -m experiments.overlap             # writes results.json and the README's tables; --table: the tables alone

Compiles ahead of time (jax[tpu] and the CUDA plugin, no accelerator), two programs at once; what was
compiled before is read from the cache, so an interrupted run goes on where it stood. Programs have 4
layers of Llama-3-70B over 8 devices; decode batch 16 at context 2048, prefill and train 1 x 1024.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
from collections.abc import Sequence

from experiments import readme
from ladder_jax.config import Launch, Loop, Phase
from ladder_jax.errors import UserError
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import result
from ladder_jax.overlap.record import Until
from ladder_jax.overlap.request import Request

TARGETS = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:8", "b200:8")
RESIDUALS = ("ladder", "standard", "no-communication")
HERE = pathlib.Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--phases", nargs="+", default=[phase.value for phase in Phase])
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json")
    parser.add_argument("--table", action="store_true", help="compile nothing: make the table of what there is")
    args = parser.parse_args()
    if not args.table:
        compile_all(args.targets, args.phases, args.out)
    rows = json.loads(args.out.read_text())["rows"]
    tables = {"programs": table(rows), "launches": launches(rows)}
    print("\n\n".join(tables.values()))
    if args.out == HERE / "results.json":
        readme.write(HERE, tables)


def compile_all(names: Sequence[str], phases: Sequence[str], out: pathlib.Path) -> None:
    asked = [
        requests.make(target=target, model="llama-3-70b", residual="ladder", phase=Phase(phase), loop=loop, layers=4)
        for phase in phases
        for loop in Loop
        for target in names
    ]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(measure, asked))
    out.write_text(json.dumps({"model": "llama-3-70b", "layers": 4, "tensor": 8, "rows": rows}, indent=1) + "\n")


def measure(request: Request) -> dict:
    """The Ladder's counts, and each topology's estimated compute."""
    found, serving = {}, request.phase is not Phase.TRAIN
    asked = {residual: dataclasses.replace(request, residual=residual) for residual in RESIDUALS}
    if serving:
        asked["chained"] = dataclasses.replace(request, launch=Launch.CHAINED)
    for name, one in asked.items():
        try:
            # An unrolled training step's machine code takes minutes; without it there are no estimated cycles.
            until = Until.SCHEDULE if one.phase is Phase.TRAIN and one.loop is Loop.UNROLLED else Until.CODE
            found[name] = result.read(one, compiling.compiled(one, until=until))
        except UserError as error:
            return {"target": request.target.name, "phase": request.phase.value, "error": str(error)}
    ladder = found["ladder"].as_dict()
    counts = {name: ladder[name] for name in KEYS}
    others = {one["for"]: 0 for one in ladder["other_collectives"]}
    for one in ladder["other_collectives"]:
        others[one["for"]] += one["count"]
    cycles = {name: answer.report.step_cycles for name, answer in found.items()}
    standard = {f"standard_{name}": found["standard"].as_dict()[name] for name in ("all_reduces", "hidden")}
    row = {**counts, "others": others, **standard, "cycles": cycles}
    if serving:
        chained = found["chained"].as_dict()
        row |= {"launch": ladder["launch"], "chained": {name: chained[name] for name in WINDOW}}
    return row


KEYS = (
    "target phase loop all_reduces asynchronous hidden merged other_hidden window_flops_fraction hidden_time_fraction"
    " bytes_per_device compiler jax compiler_options notices"
).split()


WINDOW = ("hidden", "window_flops_fraction", "hidden_time_fraction")


def launches(rows: list[dict]) -> str:
    """Markdown, a row a serving program where all-reduces have halves."""
    lines = [
        "| target | phase, loop | chained: least, median window | hidden time | explicit: least, median window"
        " | hidden time | cycles over chained |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.get("launch") != "explicit":
            continue
        cells = [row["target"], f"{row['phase']}, {row['loop']}"]
        for one in (row["chained"], row):
            window, share = one["window_flops_fraction"], one["hidden_time_fraction"]
            cells += [f"{window['least']:.2f}, {window['median']:.2f}", f"{share:.0%}" if share is not None else "-"]
        cycles = row["cycles"]
        cells.append(f"{cycles['ladder'] / cycles['chained']:.3f}" if cycles["chained"] else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(rows: list[dict]) -> str:
    """Markdown, a row a program."""
    lines = [
        "| target | phase, loop | hidden | least, median window | hidden time | others hidden | Standard hides"
        " | cycles over Standard | over none |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['target']} | {row['phase']} | {row['error']} | | | | | | |")
            continue
        window, cycles = row["window_flops_fraction"], row["cycles"]
        share = row["hidden_time_fraction"]
        ratio = lambda name: f"{cycles['ladder'] / cycles[name]:.3f}" if cycles["ladder"] else "-"
        cells = [
            row["target"],
            f"{row['phase']}, {row['loop']}",
            f"{row['hidden']} of {row['all_reduces']}",
            f"{window['least']:.2f}, {window['median']:.2f}" if window else "-",
            f"{share:.0%}" if share is not None else "-",
            f"{row['other_hidden']} of {sum(row['others'].values())}",
            f"{row['standard_hidden']} of {row['standard_all_reduces']}",
            ratio("standard"),
            ratio("no-communication"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
