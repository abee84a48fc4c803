"""How much of the communication is hidden, by the compiled schedules of every target: in every phase and loop.

    python -m experiments.overlap [--targets h100:8 ...]

Compiles Ladder, Standard and a step that never communicates ahead of time (jax[tpu] and the CUDA plugin, no
accelerator): 4 layers over 8 devices. Each row is kept as soon as it is compiled, so an interrupted run goes on where
it stood; rows that are there are not compiled again (--out a new file: all are). Then come the README's tables.
"""

import argparse
import dataclasses
import itertools
import pathlib
import sys

from experiments import study
from ladder_jax.config import Launch, Loop, Phase
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import result
from ladder_jax.overlap.record import Until

HERE = pathlib.Path(__file__).parent
TARGETS = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:8", "b200:8")
NONE = "no-communication"
LLAMA = {"model": "llama-3-70b", "layers": 4}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json", metavar="FILE", help="of the rows")
    args = parser.parse_args(argv)

    def work() -> None:
        asked = [row for row in ROWS if not args.targets or row["target"] in args.targets]
        rows = study.resumed(asked, measure, file=args.out, about={**LLAMA, "tensor": 8})
        study.show(tables(rows), folder=args.out.parent)

    return study.ended(work, name="overlap")


ROWS = [
    {"target": target, "phase": phase.value, "loop": loop.value}
    for phase, loop, target in itertools.product(Phase, Loop, TARGETS)
]
WINDOW = ("hidden", "window_flops_fraction", "hidden_time_fraction")
KEPT = (
    "all_reduces asynchronous hidden merged other_hidden window_flops_fraction hidden_time_fraction"
    " bytes_per_device compiler jax compiler_options notices"
).split()


def measure(row: dict) -> dict:
    """The Ladder's counts, and each topology's estimated compute."""
    phase, loop = Phase(row["phase"]), Loop(row["loop"])
    ladder = requests.make(target=row["target"], residual="ladder", phase=phase, loop=loop, **LLAMA)
    asked = {name: dataclasses.replace(ladder, residual=name) for name in ("ladder", "standard", NONE)}
    if phase is not Phase.TRAIN:
        asked["chained"] = dataclasses.replace(ladder, launch=Launch.CHAINED)
    # An unrolled training step's machine code takes minutes; without it there are no estimated cycles.
    until = Until.SCHEDULE if (phase, loop) == (Phase.TRAIN, Loop.UNROLLED) else Until.CODE
    answers = {name: result.read(one, compiling.compiled(one, until=until)) for name, one in asked.items()}
    found = {name: answer.as_dict() for name, answer in answers.items()}
    others: dict[str, int] = {}
    for one in found["ladder"]["other_collectives"]:
        others[one["for"]] = others.get(one["for"], 0) + one["count"]
    more = {
        "others": others,
        "standard_all_reduces": found["standard"]["all_reduces"],
        "standard_hidden": found["standard"]["hidden"],
        "cycles": {name: answer.report.step_cycles for name, answer in answers.items()},
    }
    if phase is not Phase.TRAIN:
        chained = {name: found["chained"][name] for name in WINDOW}
        more |= {"launch": found["ladder"]["launch"], "chained": chained}
    return {name: found["ladder"][name] for name in KEPT} | more


# The tables, in which "-" is what a compiler does not say.


def tables(rows: list[dict]) -> dict[str, str]:
    programs, launches = [], []
    for row in rows:
        place, cycles = [row["target"], f"{row['phase']}, {row['loop']}"], row["cycles"]
        hidden = [f"{row['hidden']} of {row['all_reduces']}", *window(row)]
        others = f"{row['other_hidden']} of {sum(row['others'].values())}"
        standard = f"{row['standard_hidden']} of {row['standard_all_reduces']}"
        ratios = [over(cycles["ladder"], cycles[name]) for name in ("standard", NONE)]
        programs.append([*place, *hidden, others, standard, *ratios])
        if row.get("launch") == "explicit":
            both = [*window(row["chained"]), *window(row)]
            launches.append([*place, *both, over(cycles["ladder"], cycles["chained"])])
    place, seen = "target | phase, loop", "least, median window | hidden time"
    others = "others hidden | Standard hides | cycles over Standard | over none"
    return {
        "programs": study.table(f"{place} | hidden | {seen} | {others}", programs),
        "launches": study.table(f"{place} | chained: {seen} | explicit: {seen} | cycles over chained", launches),
    }


def window(row: dict) -> list[str]:
    """The least window and the median one, and the time hidden."""
    sizes, time = row["window_flops_fraction"], row["hidden_time_fraction"]
    return [
        f"{sizes['least']:.2f}, {sizes['median']:.2f}" if sizes else "-",
        "-" if time is None else f"{time:.0%}",
    ]


def over(value: float | None, other: float | None) -> str:
    return f"{value / other:.3f}" if value and other else "-"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
