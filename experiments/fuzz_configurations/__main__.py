"""A random walk over legitimate configurations: does each compute what the float64 reference does?

    python -m experiments.fuzz_configurations                       # from seed 0, for ten minutes
    python -m experiments.fuzz_configurations 7 1000 3600 --processes 2
    python -m experiments.fuzz_configurations --case 7:42           # one case again, with all that it says

A case draws a model, a mesh and how it trains, through the same rules as `ladder-jax train`. Its training step's loss
and gradients are compared with the reference's, and some cases' inference, another mesh, or a run that is resumed. What
a rule refuses counts as refused. The status is 1 if anything failed.
"""

import argparse
import sys
import time

from experiments.fuzz_configurations import report
from experiments.fuzz_configurations.draw import draw
from experiments.fuzz_configurations.walk import simulate, walk, work


def main() -> int:
    summary, epilog = __doc__.split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog="python -m experiments.fuzz_configurations",
        description=summary,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("seed", type=int, nargs="?", default=0, help="of the walk (default: %(default)s)")
    parser.add_argument("count", type=int, nargs="?", help="how many cases (default: as many as the time allows)")
    parser.add_argument("seconds", type=float, nargs="?", help="no case begins later (default: 600 without a count)")
    parser.add_argument("--first", type=int, default=0, help="the index of the first case (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="cases at a time (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="list what was refused, and why")
    parser.add_argument("--case", metavar="SEED:INDEX", help="run this case, in this process")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work()
        return 0
    if args.case:
        return again(*map(int, args.case.split(":")))
    began, met, failed = time.monotonic(), [], False
    seconds = 600.0 if args.seconds is None and args.count is None else args.seconds
    limits = dict(count=args.count, seconds=seconds, processes=args.processes, first=args.first)
    try:
        for case, outcome in walk(args.seed, **limits):
            met.append((case, outcome))
            end = "\r"
            if outcome.what == "failed":
                failed, end = True, "\n"
                print(report.failure(case, outcome), flush=True)
            print(f"{report.line(met)}, {time.monotonic() - began:.0f} s", end=end, flush=True)
    except KeyboardInterrupt:
        print("\nstopped")
    print(f"\n\n{report.table(met)}\n")
    if args.verbose:
        print(f"{report.refusals(met)}\n")
    each = sum(outcome.seconds for _, outcome in met) / max(len(met), 1)
    print(f"{report.line(met)}; {each:.1f} s a case")
    return int(failed)


def again(seed: int, index: int) -> int:
    simulate()
    from experiments.fuzz_configurations.compare import outcome

    case = draw(seed, index)
    print(report.described(case), flush=True)
    found = outcome(case)
    print(f"{found.what}: {found.said or ', '.join(found.done)} ({found.seconds:.1f} s)")
    return int(found.what == "failed")


if __name__ == "__main__":
    sys.exit(main())
