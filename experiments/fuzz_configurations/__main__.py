"""A random walk over legitimate configurations: does each compute what the float64 reference does?

    python -m experiments.fuzz_configurations                  # from seed 0, for ten minutes
    python -m experiments.fuzz_configurations 7 1000 3600      # at most 1000 cases of seed 7, or an hour
    python -m experiments.fuzz_configurations --case 7:42      # one case again, with all that it says

A case draws a model, a mesh and how it trains, through the same rules as `ladder-jax train`. Its
training step's loss and gradients are compared with the reference's, and some cases' inference,
another mesh, or a run that is resumed. What a rule refuses counts as refused. The status is 1 if
anything failed.
"""

import argparse
import collections
import itertools
import re
import sys
import time
from collections.abc import Sequence

from experiments import study
from experiments.fuzz_configurations.draw import Case, Outcome, draw
from experiments.fuzz_configurations.walk import outcomes, simulate, walk, work


def main() -> int:
    parser = study.parser(__doc__, name="fuzz_configurations")
    parser.add_argument(
        "seed", type=whole, nargs="?", default=0, help="of the walk (default: %(default)s)"
    )
    parser.add_argument(
        "count", type=whole, nargs="?", help="how many cases (default: as many as the time allows)"
    )
    parser.add_argument(
        "seconds", type=float, nargs="?", help="no case begins later (default: 600 without a count)"
    )
    parser.add_argument(
        "--case", type=numbered, metavar="SEED:INDEX", help="run this case, in this process"
    )
    parser.add_argument("--worker", type=int, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.seed, args.worker)
        return 0
    if args.case:
        return again(*args.case)
    indices = itertools.count() if args.count is None else range(args.count)
    seconds = args.seconds or (600.0 if args.count is None else float("inf"))
    began = time.monotonic()
    met = []
    try:
        for case, outcome in walk(args.seed, indices, seconds=seconds):
            met.append((case, outcome))
            if outcome.what == "failed":
                print(failure(case, outcome), flush=True)
            print(f"{line(met)}, {time.monotonic() - began:.0f} s", end="\r", flush=True)
    except KeyboardInterrupt:
        print("\nstopped")
    print(
        "\n\n"
        + "\n".join(f"{count:5} compared: {name}" for name, count in compared(met).most_common())
    )
    print(
        f"{refusals(met)}\n{line(met)}; {(time.monotonic() - began) / max(len(met), 1):.1f} s a case"
    )
    return int(any(outcome.what == "failed" for _, outcome in met))


def whole(word: str) -> int:
    """Of at least 0: the draws know no other seed."""
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {word!r}")
    return int(word)


def numbered(word: str) -> tuple[int, int]:
    """The seed and the index of a case."""
    seed, _, index = word.partition(":")
    return whole(seed), whole(index)


def again(seed: int, index: int) -> int:
    simulate()
    case = draw(seed, index)
    print(described(case), flush=True)
    [(_, found)] = outcomes([case])
    print(f"{found.what}: {found.said or ', '.join(found.done)} ({found.seconds:.1f} s)")
    return int(found.what == "failed")


# What is said of the cases that a walk has met.

Met = Sequence[tuple[Case, Outcome]]


def described(case: Case) -> str:
    return f"  ladder-jax train {case.dotted}\n  {case}"


def failure(case: Case, outcome: Outcome) -> str:
    said = outcome.said.replace("\n", "\n  ")
    again = f"python -m experiments.fuzz_configurations --case {case.seed}:{case.index}"
    return f"\n{again} failed: {said}\n{described(case)}"


def line(met: Met) -> str:
    counts = collections.Counter(outcome.what for _, outcome in met)
    return f"{len(met)} cases: {', '.join(f'{counts[what]} {what}' for what in ('ran', 'refused', 'failed'))}"


def compared(met: Met) -> collections.Counter[str]:
    """How often each check was made."""
    return collections.Counter(check for _, outcome in met for check in outcome.done)


def refusals(met: Met) -> str:
    """Each reason, its numbers left out, and how often it was given."""
    refused = (outcome.said for _, outcome in met if outcome.what == "refused")
    reasons = collections.Counter(re.sub(r"\d+(\.\d+)?", "N", said) for said in refused)
    return "\n".join(f"{count:5d} {reason}" for reason, count in reasons.most_common())


if __name__ == "__main__":
    sys.exit(main())
