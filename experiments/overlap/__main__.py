"""How much of the communication is hidden, by the compiled schedules of every target.

    python -m experiments.overlap             # Ladder, Standard and none at all, in every phase and loop
    python -m experiments.overlap forms       # Standard's forms of collective matmul, and Ladder beside them
    python -m experiments.overlap exchange    # experts whose rows are exchanged

Compiles ahead of time (jax[tpu] and the CUDA plugin, no accelerator), 4 layers over 8 devices. Each row is kept as soon
as it is compiled, so an interrupted run goes on where it stood; rows that are there are not compiled again (--out a new
file: all are). Then come the README's tables.
"""

import argparse
import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator

from experiments import study
from ladder_jax.config import CollectiveMatmul, ExpertParallelism, Launch, Loop, Phase
from ladder_jax.errors import unknown
from ladder_jax.hardware import HARDWARE
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import result
from ladder_jax.overlap.compile import Record, Until
from ladder_jax.overlap.request import Request
from ladder_jax.schedule import hlo, timeline
from ladder_jax.schedule.report import Status, hidden

HERE = pathlib.Path(__file__).parent
TARGETS = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:8", "b200:8")
NONE = "no-communication"
LLAMA = {"model": "llama-3-70b", "layers": 4}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", default="programs", help=f"{', '.join(PARTS)} (default: programs)")
    parser.add_argument("--targets", nargs="+", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="of the rows (default: those of the README)")
    args = parser.parse_args(argv)

    def work() -> None:
        if args.part not in PARTS:
            raise unknown("part", args.part, PARTS)
        part = PARTS[args.part]
        file = args.out or HERE / part.file
        asked = [row for row in part.rows() if not args.targets or row["target"] in args.targets]
        rows = study.resumed(asked, part.measure, file=file, about=part.about)
        study.show(part.tables(rows), folder=file.parent)

    return study.ended(work, name="overlap")


# Ladder in every phase and loop, and what Standard and a step that never communicates have.


def programs() -> Iterator[dict]:
    for phase, loop, target in itertools.product(Phase, Loop, TARGETS):
        yield {"target": target, "phase": phase.value, "loop": loop.value}


def measure_program(row: dict) -> dict:
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


WINDOW = ("hidden", "window_flops_fraction", "hidden_time_fraction")
KEPT = (
    "all_reduces asynchronous hidden merged other_hidden window_flops_fraction hidden_time_fraction"
    " bytes_per_device compiler jax compiler_options notices"
).split()


def program_tables(rows: list[dict]) -> dict[str, str]:
    lines = []
    for row in rows:
        cells = [row["target"], f"{row['phase']}, {row['loop']}", f"{row['hidden']} of {row['all_reduces']}"]
        cells += [window(row), share(row["hidden_time_fraction"])]
        cells.append(f"{row['other_hidden']} of {sum(row['others'].values())}")
        cells.append(f"{row['standard_hidden']} of {row['standard_all_reduces']}")
        cells += [over(row["cycles"]["ladder"], row["cycles"][name]) for name in ("standard", NONE)]
        lines.append(cells)
    head = (
        "target | phase, loop | hidden | least, median window | hidden time | others hidden | Standard hides"
        " | cycles over Standard | over none"
    )
    return {"programs": study.table(head, lines), "launches": launches(rows)}


def launches(rows: list[dict]) -> str:
    """A row a serving program where all-reduces have halves."""
    lines = []
    for row in rows:
        if row.get("launch") == "explicit":
            cells = [row["target"], f"{row['phase']}, {row['loop']}"]
            for one in (row["chained"], row):
                cells += [window(one), share(one["hidden_time_fraction"])]
            lines.append([*cells, over(row["cycles"]["ladder"], row["cycles"]["chained"])])
    head = (
        "target | phase, loop | chained: least, median window | hidden time | explicit: least, median window"
        " | hidden time | cycles over chained"
    )
    return study.table(head, lines)


# Standard with sequence parallelism in each form of collective matmul, and Ladder: a prefill of 1 x 4096 tokens.

FORMS = ("standard none", "standard compiler", "standard ring", "ladder none", "ladder ring")


def forms() -> Iterator[dict]:
    for named, target in itertools.product(FORMS, TARGETS):
        residual, form = named.split()
        if form != "compiler" or target.startswith(("v", "tpu")):  # an option of XLA for TPUs
            yield {"target": target, "residual": residual, "collective_matmul": form}


def measure_form(row: dict) -> dict:
    asked = requests.make(
        **LLAMA,
        target=row["target"],
        residual=row["residual"],
        collective_matmul=CollectiveMatmul(row["collective_matmul"]),
        phase=Phase.PREFILL,
        prompt_length=4096,
        sequence_parallel=True,
    )
    answer = result.read(asked, compiling.compiled(asked))
    found = answer.as_dict()
    exposed = [one.collective for one in answer.report.reductions if one.status is not Status.HIDDEN]
    kept = "all_reduces hidden hidden_time_fraction step_cycles jax compiler".split()
    return {name: found[name] for name in kept} | {"exposed_bytes": sum(c.executions * c.bytes for c in exposed)}


def form_tables(rows: list[dict]) -> dict[str, str]:
    """Cycles are over those of Standard without collective matmuls."""
    of = {(row["target"], row["residual"], row["collective_matmul"]): row for row in rows}
    lines = []
    for target, named in itertools.product(TARGETS, FORMS):
        residual, form = named.split()
        if row := of.get((target, residual, form)):
            plain = of.get((target, "standard", "none"), {}).get("step_cycles")
            cells = [target, f"{residual.capitalize()}, {form}", f"{row['hidden']} of {row['all_reduces']}"]
            cells += [share(row["hidden_time_fraction"]), f"{row['exposed_bytes'] / 2**20:,.0f} MiB"]
            lines.append([*cells, over(row["step_cycles"], plain)])
    return {"forms": study.table("target | program | hidden | hidden time | bytes exposed | cycles", lines)}


# Experts whose rows are exchanged: 32,768 tokens, capacity 1.25.

OF_EXPERTS = {  # the second model has a shared expert
    "qwen3-30b-a3b": ("standard", "ladder", NONE),
    "qwen1.5-moe-a2.7b": ("standard", "ladder", "farskip", NONE),
}
SHAPES = {"prefill": dict(batch=1, prompt_length=32768), "train": dict(batch=8, prompt_length=4096)}


def exchanges() -> Iterator[dict]:
    targets = ("v5p:2x2x2", "tpu7x:2x2x1", "h100:8", "v6e:2x4")
    for target, phase, (model, residuals) in itertools.product(targets, SHAPES, OF_EXPERTS.items()):
        for residual in residuals:
            if residual != NONE or (phase == "prefill" and target != "h100:8"):  # only its cycles are of use
                yield {"phase": phase, "target": target, "model": model, "residual": residual}


def measure_exchange(row: dict) -> dict:
    """Counts of a program's collectives in both directions; of a prefill for TPUs cycles and simulated seconds."""
    settings = dict(sequence_parallel=True, experts=ExpertParallelism.EXCHANGE, **SHAPES[row["phase"]])
    request = requests.make(layers=4, **{**row, "phase": Phase(row["phase"])}, **settings)
    # Of a training step the schedule alone: its machine code takes minutes a program.
    record = compiling.compiled(request, until=Until.SCHEDULE if row["phase"] == "train" else Until.CODE)
    report = result.read(request, record).report
    found = {}
    for backward, exchanged in itertools.product((False, True), repeat=2):
        these = [one for one in report.reductions if (one.backward, one.exchanges) == (backward, exchanged)]
        name = ("all_to_alls" if exchanged else "others") + ("_backward" if backward else "")
        found[name] = [hidden(these), sum(one.count for one in these)]
    seconds = None if report.step_cycles is None else simulated(request, record)
    return {**found, "cycles": report.step_cycles, "seconds": seconds, "jax": record.jax, "compiler": record.compiler}


def simulated(request: Request, record: Record) -> float:
    """Seconds of the compiled schedule by `schedule.timeline`: the compiler's cycles, published links, no latency."""
    hardware, experts = HARDWARE[request.target.kind], requests.experts(request)
    bars = timeline.play(hlo.parse(record.hlo), hardware=hardware, ranks=request.tensor, experts=experts)
    return max(bar.stop for bar in bars)


def exchange_tables(rows: list[dict]) -> dict[str, str]:
    """Cycles and simulated time are over those of the same model without communication."""
    of = {tuple(row[key] for key in ("phase", "target", "model", "residual")): row for row in rows}
    counts = lambda row, name: "{} of {}".format(*row[name])
    prefill, train = [], []
    for place in (tuple(asked.values()) for asked in exchanges()):
        if place not in of:
            continue
        row, named = of[place], place[1:]
        if place[0] == "train":
            both = [f"{counts(row, name)}, {counts(row, f'{name}_backward')}" for name in ("all_to_alls", "others")]
            train.append([*named, *both])
            continue
        none = of.get((*place[:-1], NONE), {})
        shown = ["-", "-"] if row["residual"] == NONE else [counts(row, "all_to_alls"), counts(row, "others")]
        prefill.append([*named, *shown, *(over(row[key], none.get(key)) for key in ("cycles", "seconds"))])
    head = "target | model | program | all-to-alls hidden"
    directions = ": forward, backward"
    return {
        "exchange": study.table(f"{head} | gathers and scatters hidden | cycles | simulated time", prefill),
        "exchange-train": study.table(f"{head}{directions} | gathers and scatters hidden{directions}", train),
    }


# Cells; what a compiler does not say is "-".


def window(row: dict) -> str:
    found = row["window_flops_fraction"]
    return f"{found['least']:.2f}, {found['median']:.2f}" if found else "-"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def over(value: float | None, other: float | None) -> str:
    return f"{value / other:.3f}" if value and other else "-"


@dataclasses.dataclass(frozen=True)
class Part:
    """rows: what there is to compile, of which `measure` takes one. about: what the file says of all of them."""

    file: str
    about: dict
    rows: Callable[[], Iterator[dict]]
    measure: Callable[[dict], dict]
    tables: Callable[[list[dict]], dict[str, str]]


EIGHT = {**LLAMA, "tensor": 8}
PARTS = {
    "programs": Part("results.json", EIGHT, programs, measure_program, program_tables),
    "forms": Part("forms.json", {**EIGHT, "prompt_length": 4096}, forms, measure_form, form_tables),
    "exchange": Part(
        "exchange.json",
        {"layers": 4, "tensor": 8, "capacity": 1.25},
        exchanges,
        measure_exchange,
        exchange_tables,
    ),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
