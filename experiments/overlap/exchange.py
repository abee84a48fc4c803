"""Experts whose rows are exchanged: Standard, Ladder, FarSkip and no communication, with and without a shared expert.

    python -m experiments.overlap.exchange    # writes exchange.json and the README's tables; --table: the tables alone

4 layers of two models over 8 devices, 32,768 tokens, capacity 1.25, compiled ahead of time as in `__main__.py`. Each
program is written down when it is compiled, so an interrupted run goes on where it stood.
"""

import argparse
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence

from experiments import readme
from ladder_jax.config import ExpertParallelism, Phase
from ladder_jax.errors import UserError
from ladder_jax.hardware import HARDWARE
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import result
from ladder_jax.overlap.record import Record, Until
from ladder_jax.overlap.request import Request
from ladder_jax.schedule import hlo, timeline
from ladder_jax.schedule.report import Reduction, hidden

HERE = pathlib.Path(__file__).parent
TARGETS = ("v5p:2x2x2", "tpu7x:2x2x1", "h100:8", "v6e:2x4")
NONE = "no-communication"
PROGRAMS = {  # the second model has a shared expert
    "qwen3-30b-a3b": ("standard", "ladder", NONE),
    "qwen1.5-moe-a2.7b": ("standard", "ladder", "farskip", NONE),
}
SHAPES = {Phase.PREFILL: dict(batch=1, prompt_length=32768), Phase.TRAIN: dict(batch=8, prompt_length=4096)}
KEYS = ("phase", "target", "model", "residual")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--phases", nargs="+", default=[phase.value for phase in SHAPES])
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "exchange.json")
    parser.add_argument("--table", action="store_true", help="compile nothing: make the tables of what there is")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for request in [] if args.table else programs(args.targets, args.phases):
        row = measure(request)
        rows = [*(one for one in rows if any(one[key] != row[key] for key in KEYS)), row]
        args.out.write_text(json.dumps({"layers": 4, "tensor": 8, "capacity": 1.25, "rows": rows}, indent=1) + "\n")
    tables = {"exchange": prefill_table(rows), "exchange-train": train_table(rows)}
    print("\n\n".join(tables.values()))
    if args.out == HERE / "exchange.json":
        readme.write(HERE, tables)


def programs(targets: Sequence[str], phases: Sequence[str]) -> Iterator[Request]:
    for target, phase in itertools.product(targets, map(Phase, phases)):
        for model, residuals in PROGRAMS.items():
            for residual in residuals:
                if residual == NONE and (phase is Phase.TRAIN or target.startswith("h100")):
                    continue  # only its cycles are of use, and there are none
                settings = dict(sequence_parallel=True, experts=ExpertParallelism.EXCHANGE, **SHAPES[phase])
                yield requests.make(target=target, model=model, residual=residual, phase=phase, layers=4, **settings)


def measure(request: Request) -> dict:
    """Counts of a program's collectives in both directions; of a prefill for TPUs cycles and simulated seconds."""
    row = {key: request.as_dict()[key] for key in KEYS}
    try:
        # Of a training step the schedule alone: its machine code takes minutes a program.
        record = compiling.compiled(request, until=Until.SCHEDULE if request.phase is Phase.TRAIN else Until.CODE)
    except UserError as error:
        return {**row, "error": str(error)}
    answer = result.read(request, record)
    for backward, exchanged in itertools.product((False, True), repeat=2):
        these = [r for r in answer.report.reductions if (r.backward, r.exchanges) == (backward, exchanged)]
        name = ("all_to_alls" if exchanged else "others") + ("_backward" if backward else "")
        row[name] = _counts(these)
    seconds = None if answer.report.step_cycles is None else simulated(request, record)
    versions = {"jax": record.jax, "compiler": record.compiler}
    return {**row, "cycles": answer.report.step_cycles, "seconds": seconds, **versions}


def simulated(request: Request, record: Record) -> float:
    """Seconds of the compiled schedule by `schedule.timeline`: the compiler's cycles, published links, no latency."""
    hardware, experts = HARDWARE[request.target.kind], requests.experts(request)
    bars = timeline.play(hlo.parse(record.hlo), hardware=hardware, ranks=request.tensor, experts=experts)
    return max(bar.stop for bar in bars)


def _counts(these: Sequence[Reduction]) -> list[int]:
    return [hidden(these), sum(r.count for r in these)]


def prefill_table(rows: list[dict]) -> str:
    """Markdown, a row a program; cycles and simulated time over those of the same model without communication."""
    lines = [
        "| target | model | program | all-to-alls hidden | gathers and scatters hidden | cycles | simulated time |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, none in _of_phase(rows, Phase.PREFILL):
        ratio = lambda key: f"{row[key] / none[key]:.3f}" if row[key] and none and none[key] else "-"
        counts = [_of(row["all_to_alls"]), _of(row["others"])] if row["residual"] != NONE else ["-", "-"]
        cells = [row["target"], row["model"], row["residual"], *counts, ratio("cycles"), ratio("seconds")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def train_table(rows: list[dict]) -> str:
    """Markdown, a row a program."""
    lines = [
        "| target | model | program | all-to-alls hidden: forward, backward | gathers and scatters hidden: forward,"
        " backward |",
        "|---|---|---|---|---|",
    ]
    for row, _ in _of_phase(rows, Phase.TRAIN):
        counts = [f"{_of(row[name])}, {_of(row[f'{name}_backward'])}" for name in ("all_to_alls", "others")]
        lines.append(f"| {' | '.join([row['target'], row['model'], row['residual'], *counts])} |")
    return "\n".join(lines)


def _of_phase(rows: list[dict], phase: Phase) -> Iterator[tuple[dict, dict | None]]:
    """Compiled rows in the order of PROGRAMS, each with that of its model without communication."""
    of = {tuple(row[key] for key in KEYS): row for row in rows if "error" not in row}
    for target, (model, residuals) in itertools.product(TARGETS, PROGRAMS.items()):
        for residual in residuals:
            if row := of.get((phase.value, target, model, residual)):
                yield row, of.get((phase.value, target, model, NONE))


def _of(counts: list[int]) -> str:
    return "{} of {}".format(*counts)


if __name__ == "__main__":
    main()
