"""Are the planner's estimates right? Training steps compiled for their targets, beside what shapes
alone say.

    nice python -m experiments.plan --out FILE    # minutes a program; rows in FILE are kept

Compiles the programs of results.json's rows again; without --out it makes the README's tables of
them anew.
"""

import pathlib
import sys

from experiments import study
from ladder_jax.config import MeshConfig, Remat
from ladder_jax.plan import confirm, memory, request
from ladder_jax.plan.request import Candidate

HERE = pathlib.Path(__file__).parent
# of a row, what is the request's
ASKED = "model target tokens sequence layers residual capacity".split()
FOUND = "bytes_per_device host_bytes temporary_bytes jax compiler refusal".split()


def measured(row: dict) -> dict:
    found = confirm.confirm(candidate(row))
    sizes = found.device, found.host, found.temporaries
    return dict(zip(FOUND, (*sizes, found.jax, found.compiler, found.refusal)))


def requested(row: dict) -> request.Request:
    return request.make(**{name: row[name] for name in ASKED if name in row})


def candidate(row: dict) -> Candidate:
    mesh = MeshConfig(*row["mesh"], experts=row.get("experts", "reduce"))
    asked = requested(row)
    rows = asked.sequences // (mesh.data * mesh.fsdp) // row["accumulate"]
    form = dict(sequence_parallel=row["sequence_parallel"], interleave=row.get("interleave", 1))
    return Candidate(
        asked, mesh, Remat(row["remat"]), rows=rows, accumulate=row["accumulate"], **form
    )


def tables(rows: list[dict]) -> dict[str, str]:
    dense = []
    experts = []
    halves = []
    for row in rows:
        one = candidate(row)
        found = memory.estimate(one)
        size = row["bytes_per_device"]
        sizes = [gib(size), gib(found.device), f"{found.device / size - 1:+.0%}"]
        if "experts" in row:
            experts.append(
                [" x ".join(map(str, row["mesh"])), row["residual"], row["remat"], one.rows, *sizes]
            )
        elif "interleave" in row:
            halves.append([row["remat"], {1: "whole", 2: "two halves"}[row["interleave"]], *sizes])
        else:
            stream = "split" if row["sequence_parallel"] else "whole"
            on_host = [gib(row["host_bytes"], digits=2), gib(found.host, digits=2)]
            dense.append([row["layers"], row["remat"], stream, row["accumulate"], *sizes, *on_host])
    compared = "compiled, GiB | estimated | error"
    return {
        "memory": study.table(
            f"layers | remat | stream | parts | {compared} | on the host, GiB | estimated", dense
        ),
        "halves": study.table(f"remat | batch | {compared}", halves),
        "experts": study.table(
            f"mesh | residual | remat | sequences at a time | {compared}", experts
        ),
    }


def gib(size: float, *, digits: int = 1) -> str:
    return f"{size / 2**30:.{digits}f}"


def main(argv: list[str]) -> int:
    parser = study.parser(__doc__, name="plan")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=HERE / "results.json",
        metavar="FILE",
        help="of the rows",
    )
    file = parser.parse_args(argv).out

    def work() -> None:
        asked = study.asked(HERE / "results.json", found=FOUND)
        rows = study.resumed(asked, measured, file=file, about={})
        study.show(tables(rows), folder=file.parent)

    return study.ended(work, name="plan")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
