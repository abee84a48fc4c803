"""Are the planner's estimates right? Training steps compiled for their targets, beside what shapes alone say.

    nice python -m experiments.plan [--only N] [--out FILE]    # minutes a program; rows that are there are kept

Writes results.json and the README's tables.
"""

import argparse
import pathlib
import sys

from experiments import study
from ladder_jax.config import MeshConfig, Remat
from ladder_jax.plan import confirm, memory, request
from ladder_jax.plan.request import Candidate

MODEL = dict(model="llama-3-70b", target="v5p:4x4x4", sequence=8192)
STEP = dict(MODEL, tokens=4_194_304, mesh=[1, 16, 4], accumulate=32)
CASES = [
    STEP | dict(layers=80, remat="save-matmuls", sequence_parallel=False),
    STEP | dict(layers=80, remat="save-matmuls", sequence_parallel=True),
    STEP | dict(layers=80, remat="full", sequence_parallel=False),
    STEP | dict(layers=80, remat="full", sequence_parallel=True),
    STEP | dict(layers=4, remat="full", sequence_parallel=False),
    STEP | dict(layers=4, remat="offload", sequence_parallel=False),
    STEP | dict(layers=4, remat="save-matmuls", sequence_parallel=True),
    STEP | dict(layers=4, remat="full", sequence_parallel=False, accumulate=1, tokens=131_072),
]
EXPERTS = dict(model="qwen3-30b-a3b", target="v5p:2x2x2", sequence=4096, tokens=65_536, layers=4, capacity=1.25)
EXCHANGED = EXPERTS | dict(experts="exchange", sequence_parallel=True)
CASES += [
    EXCHANGED | dict(mesh=[1, 1, 8], residual="ladder", remat="none", accumulate=8),
    EXCHANGED | dict(mesh=[1, 1, 8], residual="ladder", remat="save-matmuls", accumulate=4),
    EXCHANGED | dict(mesh=[1, 1, 8], residual="ladder", remat="full", accumulate=1),
    EXCHANGED | dict(mesh=[1, 2, 4], residual="standard", remat="full", accumulate=1),
]
IN_TURN = dict(model="llama-3-70b", target="v5p:2x2x2", sequence=2048, tokens=32_768, layers=4, residual="standard")
IN_TURN |= dict(mesh=[1, 1, 8], sequence_parallel=False, accumulate=4)
CASES += [IN_TURN | dict(remat=remat, interleave=parts) for remat in ("none", "full") for parts in (1, 2)]
HERE = pathlib.Path(__file__).parent
ASKED = "model target tokens sequence layers residual capacity".split()  # of a case, what is the request's


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, metavar="N", help="the first N cases")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json", metavar="FILE")
    args = parser.parse_args(argv)

    def work() -> None:
        rows = study.resumed(CASES[: args.only], measured, file=args.out, about={})
        study.show(tables(rows), folder=args.out.parent)

    return study.ended(work, name="plan")


def measured(case: dict) -> dict:
    found = confirm.confirm(candidate(case), request=requested(case))
    sizes = {"bytes_per_device": found.device, "host_bytes": found.host, "temporary_bytes": found.temporaries}
    return {**sizes, "jax": found.jax, "compiler": found.compiler, "refusal": found.refusal}


def requested(case: dict) -> request.Request:
    return request.make(**{name: case[name] for name in ASKED if name in case})


def candidate(case: dict) -> Candidate:
    mesh = MeshConfig(*case["mesh"], experts=case.get("experts", "reduce"))
    rows = requested(case).sequences // (mesh.data * mesh.fsdp) // case["accumulate"]
    form = dict(sequence_parallel=case["sequence_parallel"], interleave=case.get("interleave", 1))
    return Candidate(mesh, Remat(case["remat"]), rows=rows, accumulate=case["accumulate"], **form)


def tables(rows: list[dict]) -> dict[str, str]:
    dense, experts, halves = [], [], []
    for row in rows:
        one = candidate(row)
        found, size = memory.estimate(one, request=requested(row)), row["bytes_per_device"]
        sizes = [gib(size), gib(found.device), f"{found.device / size - 1:+.0%}"]
        if "experts" in row:
            experts.append([" x ".join(map(str, row["mesh"])), row["residual"], row["remat"], one.rows, *sizes])
        elif "interleave" in row:
            halves.append([row["remat"], {1: "whole", 2: "two halves"}[row["interleave"]], *sizes])
        else:
            stream = "split" if row["sequence_parallel"] else "whole"
            on_host = [gib(row["host_bytes"], digits=2), gib(found.host, digits=2)]
            dense.append([row["layers"], row["remat"], stream, row["accumulate"], *sizes, *on_host])
    compared = "compiled, GiB | estimated | error"
    return {
        "memory": study.table(f"layers | remat | stream | parts | {compared} | on the host, GiB | estimated", dense),
        "halves": study.table(f"remat | batch | {compared}", halves),
        "experts": study.table(f"mesh | residual | remat | sequences at a time | {compared}", experts),
    }


def gib(size: float, *, digits: int = 1) -> str:
    return f"{size / 2**30:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
