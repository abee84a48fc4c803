"""Standard with sequence parallelism in each form of collective matmul, and Ladder beside it: every target's schedule.

    python -m experiments.overlap.forms       # writes forms.json and the README's table; --table: the table alone

A prefill of 1 x 4096 tokens, 4 layers of Llama-3-70B over 8 devices, compiled ahead of time as in `__main__.py`. Each
program is written down when it is compiled, so an interrupted run goes on where it stood.
"""

import argparse
import json
import pathlib

from experiments import readme
from experiments.overlap.__main__ import TARGETS
from ladder_jax.config import CollectiveMatmul, Phase
from ladder_jax.errors import UserError
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import result
from ladder_jax.schedule.report import Status

HERE = pathlib.Path(__file__).parent
NONE, COMPILER, RING = CollectiveMatmul.NONE, CollectiveMatmul.COMPILER, CollectiveMatmul.RING
PROGRAMS = [("standard", NONE), ("standard", COMPILER), ("standard", RING), ("ladder", NONE), ("ladder", RING)]
KEYS = "target residual collective_matmul all_reduces hidden hidden_time_fraction step_cycles jax compiler".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "forms.json")
    parser.add_argument("--table", action="store_true", help="compile nothing: make the table of what there is")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for residual, form in [] if args.table else PROGRAMS:
        for target in args.targets:
            if target.startswith(("h100", "b200")) and form is COMPILER:
                continue  # an option of XLA for TPUs
            found = measure(target, residual, form)
            same = lambda row, found=found: all(row[key] == found[key] for key in KEYS[:3])
            rows = [*(row for row in rows if not same(row)), found]
            shape = {"model": "llama-3-70b", "layers": 4, "tensor": 8, "prompt_length": 4096}
            args.out.write_text(json.dumps({**shape, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    if args.out == HERE / "forms.json":
        readme.write(HERE, {"forms": table(rows)})


def measure(target: str, residual: str, form: CollectiveMatmul) -> dict:
    asked = requests.make(
        target=target,
        model="llama-3-70b",
        residual=residual,
        phase=Phase.PREFILL,
        layers=4,
        prompt_length=4096,
        sequence_parallel=True,
        collective_matmul=form,
    )
    try:
        answer = result.read(asked, compiling.compiled(asked))
    except UserError as error:
        named = dict(target=target, residual=residual, collective_matmul=form.value)
        return {**named, "error": str(error)}
    found = answer.as_dict()
    exposed = [r.collective for r in answer.report.reductions if r.status is not Status.HIDDEN]
    return {**{name: found[name] for name in KEYS}, "exposed_bytes": sum(c.executions * c.bytes for c in exposed)}


def table(rows: list[dict]) -> str:
    """Markdown, a row a target and program; cycles over those of Standard without collective matmuls."""
    of = {tuple(row[key] for key in KEYS[:3]): row for row in rows}
    lines = ["| target | program | hidden | hidden time | bytes exposed | cycles |", "|---|---|---|---|---|---|"]
    for target in TARGETS:
        plain = of.get((target, "standard", NONE.value), {}).get("step_cycles")
        for residual, form in PROGRAMS:
            row = of.get((target, residual, form.value))
            if row is None:
                continue
            name = f"{residual.capitalize()}, {form.value}"
            if "error" in row:
                lines.append(f"| {target} | {name} | {row['error']} | | | |")
                continue
            share, cycles = row["hidden_time_fraction"], row["step_cycles"]
            cells = [
                target,
                name,
                f"{row['hidden']} of {row['all_reduces']}",
                "-" if share is None else f"{share:.0%}",
                f"{row['exposed_bytes'] / 2**20:,.0f} MiB",
                f"{cycles / plain:.3f}" if cycles and plain else "-",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
