"""Are the planner's estimates right? Training steps compiled for their targets, beside what shapes alone say.

    nice python -m experiments.plan [--only N | --missing] [--out FILE]  # minutes a program; what was compiled is kept

Writes results.json and the README's table.
"""

import argparse
import json
import pathlib

from experiments import readme
from ladder_jax.config import MeshConfig, Remat
from ladder_jax.plan import confirm, memory, request
from ladder_jax.plan.candidate import Candidate

MODEL = dict(model="llama-3-70b", target="v5p:4x4x4", sequence=8192)
STEP = dict(MODEL, tokens=4_194_304, mesh=(1, 16, 4), accumulate=32)
CASES = (
    STEP | dict(layers=80, remat="save-matmuls", sequence_parallel=False),
    STEP | dict(layers=80, remat="save-matmuls", sequence_parallel=True),
    STEP | dict(layers=80, remat="full", sequence_parallel=False),
    STEP | dict(layers=80, remat="full", sequence_parallel=True),
    STEP | dict(layers=4, remat="full", sequence_parallel=False),
    STEP | dict(layers=4, remat="offload", sequence_parallel=False),
    STEP | dict(layers=4, remat="save-matmuls", sequence_parallel=True),
    STEP | dict(layers=4, remat="full", sequence_parallel=False, accumulate=1, tokens=131_072),
)
EXPERTS = dict(model="qwen3-30b-a3b", target="v5p:2x2x2", sequence=4096, tokens=65_536, layers=4, capacity=1.25)
EXCHANGED = EXPERTS | dict(experts="exchange", sequence_parallel=True)
OF_EXPERTS = (
    EXCHANGED | dict(mesh=(1, 1, 8), residual="ladder", remat="none", accumulate=8),
    EXCHANGED | dict(mesh=(1, 1, 8), residual="ladder", remat="save-matmuls", accumulate=4),
    EXCHANGED | dict(mesh=(1, 1, 8), residual="ladder", remat="full", accumulate=1),
    EXCHANGED | dict(mesh=(1, 2, 4), residual="standard", remat="full", accumulate=1),
)
HERE = pathlib.Path(__file__).parent
ASKED = "model target tokens sequence layers residual capacity".split()  # of a case, what is the request's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, help="so many cases, the first ones")
    parser.add_argument("--missing", action="store_true", help="only the cases of which there is no row")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json")
    parser.add_argument("--table", action="store_true", help="compile nothing: print the table of what there is")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.table or args.missing else []
    for case in () if args.table else (*CASES, *OF_EXPERTS)[: args.only]:
        if not any(as_json(case).items() <= row.items() for row in rows):
            rows.append(measured(case))
            args.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    found = {
        "memory": table([row for row in rows if "experts" not in row]),
        "experts": experts_table([row for row in rows if "experts" in row]),
    }
    print(*found.values(), sep="\n\n")
    if args.out.parent == HERE and args.only is None:
        readme.write(HERE, found)


def as_json(case: dict) -> dict:
    """A case as JSON has it."""
    return {**case, "mesh": list(case["mesh"])}


def measured(case: dict) -> dict:
    one, asked = of(case)
    found = confirm.confirm(one, request=asked)
    sizes = {"bytes_per_device": found.device, "host_bytes": found.host, "temporary_bytes": found.temporaries}
    return {**as_json(case), **sizes, "jax": found.jax,
            "compiler": found.compiler, "refusal": found.refusal}  # fmt: skip


def of(case: dict) -> tuple[Candidate, request.Request]:
    asked = request.make(**{name: case[name] for name in ASKED if name in case})
    mesh = MeshConfig(*case["mesh"], experts=case.get("experts", "reduce"))
    rows = asked.sequences // (mesh.data * mesh.fsdp) // case["accumulate"]
    return Candidate(mesh, Remat(case["remat"]), case["sequence_parallel"], rows, case["accumulate"]), asked


def table(rows: list[dict]) -> str:
    lines = ["| layers | remat | stream | parts | compiled, GiB | estimated | error | on the host, GiB | estimated |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        one, asked = of(row)
        found, size = memory.estimate(one, request=asked), row["bytes_per_device"]
        cells = [row["layers"], row["remat"], "split" if row["sequence_parallel"] else "whole", row["accumulate"]]
        cells += [f"{size / 2**30:.1f}", f"{found.device / 2**30:.1f}", f"{found.device / size - 1:+.0%}"]
        cells += [f"{row['host_bytes'] / 2**30:.2f}", f"{found.host / 2**30:.2f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def experts_table(rows: list[dict]) -> str:
    lines = [
        "| mesh | residual | remat | sequences at a time | compiled, GiB | estimated | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one, asked = of(row)
        found, size = memory.estimate(one, request=asked).device, row["bytes_per_device"]
        cells = [" x ".join(map(str, row["mesh"])), row["residual"], row["remat"], one.rows, f"{size / 2**30:.1f}"]
        cells += [f"{found / 2**30:.1f}", f"{found / size - 1:+.0%}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
