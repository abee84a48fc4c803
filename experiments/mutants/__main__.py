"""Would `make test` notice? Random mutants of the package's core, each against the test files that execute it.

    python -m experiments.mutants                          # a hundred; goes on where it stood
    python -m experiments.mutants --count 10 --tests tests/test_residual.py tests/test_numerics.py
    python -m experiments.mutants --list                   # the mutants, without running anything

First each test file runs once, in a process of its own, and notes which lines of the package it and the processes that
it starts execute. Then a mutant is written into a copy of the repository, and the files that execute its line run, the
quickest first, until a test fails: killed. A test that does not execute the line cannot kill it. What takes over three
times as long as without the mutant counts as killed too. Mutants are of functions' bodies, as many of each package.
"""

import argparse
import concurrent.futures
import difflib
import hashlib
import itertools
import json
import pathlib
import queue
import random
import sys
import tempfile

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.mutants.operators import Mutant, is_program, mutants
from experiments.mutants.scratch import ROOT, Scratch

PACKAGES = ("residual", "nn", "parallel", "schedule", "train", "decode", "checkpoint")
FOLDER = ROOT / ".cache" / "mutants"
GOAL = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time; each needs about 4 GB")
    parser.add_argument(
        "--within", type=float, metavar="SECONDS", help="a mutant gets only the quickest tests, in all so long"
    )
    parser.add_argument("--tests", nargs="+", metavar="FILE[::TEST]", help="only these (default: all of make test)")
    parser.add_argument(
        "--out", type=pathlib.Path, default=FOLDER, help="where results are kept (default: %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    args = parser.parse_args()
    chosen = choose(count=args.count, seed=args.seed)
    if args.list:
        sys.exit("\n".join(map(difference, chosen)))
    args.out.mkdir(parents=True, exist_ok=True)
    tests = args.tests or sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, bar() as progress:
        free: queue.Queue[Scratch] = queue.Queue()
        for job in range(args.jobs):
            free.put(Scratch.copy(pathlib.Path(folder, str(job))))
        executed = executed_lines(tests, free, args.out / "lines.json", args.jobs, progress)
        results = run(chosen, executed, free, args.out / "results.jsonl", args.jobs, progress, within=args.within)
    report(chosen, results)


def bar() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def choose(*, count: int, seed: int) -> list[Mutant]:
    """As many of each package, at random; the first ones of a larger `count` are those of a smaller one."""
    order = random.Random(seed)
    each = []
    for package in PACKAGES:
        paths = sorted((ROOT / "ladder_jax" / package).rglob("*.py"))
        found = [m for p in paths for m in mutants(str(p.relative_to(ROOT)), p.read_text(encoding="utf-8"))]
        each.append(order.sample(found, len(found)))
    in_turn = itertools.chain(*itertools.zip_longest(*each))
    can_be = lambda m: m is not None and is_program(m.of((ROOT / m.file).read_text(encoding="utf-8")))
    return list(itertools.islice(filter(can_be, in_turn), count))


def key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def executed_lines(tests, free, file: pathlib.Path, jobs: int, progress: Progress) -> dict[str, dict]:
    """Of each test file its seconds, and what it executes; kept for as long as neither it nor the package changes."""
    package = [p.read_text(encoding="utf-8") for p in sorted((ROOT / "ladder_jax").rglob("*.py"))]
    keys = {test: key(test, (ROOT / test.split("::")[0]).read_text(encoding="utf-8"), *package) for test in tests}
    kept = json.loads(file.read_text()) if file.exists() else {}
    task = progress.add_task("what tests execute", total=len(tests))

    def trace(test: str) -> None:
        if kept.get(test, {}).get("key") != keys[test]:
            scratch = free.get()
            try:
                with tempfile.TemporaryDirectory() as lines:
                    outcome = scratch.test([test], timeout=3600, lines=pathlib.Path(lines))
                    noted = set().union(*(p.read_text().split("\n") for p in pathlib.Path(lines).glob("*.lines")))
            finally:
                free.put(scratch)
            if outcome.status not in (0, 5):  # 5: it has no test that `make test` runs
                raise SystemExit(f"{test} fails without a mutant:\n{outcome.said[-3000:]}")
            kept[test] = dict(key=keys[test], seconds=round(outcome.seconds, 1), lines=sorted(noted))
            file.write_text(json.dumps(kept))
        progress.advance(task)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(trace, tests))
    return {test: kept[test] for test in tests}


def run(
    chosen, executed, free, file: pathlib.Path, jobs: int, progress: Progress, *, within: float | None
) -> dict[Mutant, dict]:
    """What became of each mutant, a line of JSON each.

    One that is in the file is not run again, but for a survivor whose tests, or the package, have changed.
    within: seconds of tests that a mutant gets, the quickest; what they do not kill counts as a survivor.
    """
    done = {}
    if file.exists():
        done = {row["key"]: row for row in map(json.loads, file.read_text().splitlines())}
    lines = {test: set(noted["lines"]) for test, noted in executed.items()}
    task = progress.add_task("mutants", total=len(chosen))

    def attempt(mutant: Mutant) -> dict:
        source = (ROOT / mutant.file).read_text(encoding="utf-8")
        tests = [t for t in executed if any(f"{mutant.file}:{line}" in lines[t] for line in mutant.lines)]
        tests.sort(key=lambda test: executed[test]["seconds"])
        if within is not None:
            totals = itertools.accumulate(executed[test]["seconds"] for test in tests)
            tests = [test for test, total in zip(tests, totals) if total <= within]
        name, given = key(mutant.of(source), mutant.file), key(*sorted(executed[test]["key"] for test in tests))
        if name not in done or (done[name]["survived"] and done[name]["given"] != given):
            scratch = free.get()
            try:
                with scratch.with_source(mutant.file, mutant.of(source)):
                    limit = 60 + 3 * sum(executed[test]["seconds"] for test in tests)
                    outcome = scratch.test(tests, timeout=limit) if tests else None
            finally:
                free.put(scratch)
            survived = outcome is None or outcome.status == 0
            by = "time" if outcome and outcome.status is None else killer(outcome.said) if outcome else None
            seconds = round(outcome.seconds, 1) if outcome else 0.0
            done[name] = dict(
                key=name, given=given, file=mutant.file, line=mutant.lines[0], text=mutant.text, survived=survived,
                by=None if survived else by, tests=len(tests), seconds=seconds,
            )  # fmt: skip
            with file.open("a", encoding="utf-8") as lines_file:
                lines_file.write(json.dumps(done[name]) + "\n")
        progress.advance(task)
        return done[name]

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return dict(zip(chosen, pool.map(attempt, chosen)))


def killer(said: str) -> str:
    """The test that failed, or the end of what pytest said (of a module that cannot be imported, say)."""
    failed = [
        line.split(" - ")[0].split(" ", 1)[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))
    ]
    return failed[0] if failed else said.strip()[-200:]


def difference(mutant: Mutant) -> str:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    before, after = source.splitlines(), mutant.of(source).splitlines()
    return "\n".join(difflib.unified_diff(before, after, mutant.file, mutant.file, n=1, lineterm=""))


def report(chosen: list[Mutant], results: dict[Mutant, dict]) -> None:
    survivors = [mutant for mutant in chosen if results[mutant]["survived"]]
    for mutant in survivors:
        print(f"{difference(mutant)}\nsurvived {results[mutant]['tests']} test files\n")
    killed = len(chosen) - len(survivors)
    print(f"{killed} of {len(chosen)} mutants killed ({killed / len(chosen):.0%}; the goal is {GOAL:.0%})")
    sys.exit(killed < GOAL * len(chosen))


if __name__ == "__main__":
    main()
