"""Are the planner's estimates right? Training steps compiled for their targets, beside what shapes alone say.

    nice python -m experiments.plan [--only N] [--out FILE]      # minutes a program; what was compiled is kept

Prints the table of the README.
"""

import argparse
import json
import pathlib

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
ASKED = "model target tokens sequence layers".split()  # of a case, what is the request's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, help="so many cases, the first ones")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_name("results.json"))
    parser.add_argument("--table", action="store_true", help="compile nothing: print the table of what there is")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.table else [measured(case) for case in CASES[: args.only]]
    if not args.table:
        args.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(table(rows))


def measured(case: dict) -> dict:
    one, asked = of(case)
    found = confirm.confirm(one, request=asked)
    sizes = {"bytes_per_device": found.device, "host_bytes": found.host, "temporary_bytes": found.temporaries}
    return {**case, "mesh": list(case["mesh"]), **sizes, "program": "train_step", "jax": found.jax,
            "compiler": found.compiler, "refusal": found.refusal}  # fmt: skip


def of(case: dict) -> tuple[Candidate, request.Request]:
    asked, mesh = request.make(**{name: case[name] for name in ASKED}), MeshConfig(*case["mesh"])
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


if __name__ == "__main__":
    main()
