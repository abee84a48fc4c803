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
import difflib
import hashlib
import itertools
import json
import pathlib
import random
import sys
import tempfile

from rich.progress import track

from experiments import study
from experiments.mutants.operators import Mutant, is_program, mutants
from experiments.mutants.scratch import ROOT, Scratch

PACKAGES = ("residual", "nn", "parallel", "schedule", "train", "decode", "checkpoint")
FOLDER = ROOT / ".cache" / "mutants"
GOAL = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", metavar="FILE[::TEST]", help="only these (default: all of make test)")
    parser.add_argument(
        "--out", type=pathlib.Path, default=FOLDER, help="where results are kept (default: %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    args = parser.parse_args()
    chosen = choose(count=args.count, seed=args.seed)
    if args.list:
        sys.exit("\n".join(map(difference, chosen)))
    tests = args.tests or sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        scratch = Scratch.copy(pathlib.Path(folder))
        executed = trace(tests, scratch, file=args.out / "lines.json")
        results = run(chosen, executed, scratch, file=args.out / "results.jsonl")
    report(chosen, results)


def choose(*, count: int, seed: int) -> list[Mutant]:
    """As many of each package, at random; the first ones of a larger `count` are those of a smaller one."""
    order = random.Random(seed)
    each = []
    for package in PACKAGES:
        paths = sorted((ROOT / "ladder_jax" / package).rglob("*.py"))
        found = [m for p in paths for m in mutants(str(p.relative_to(ROOT)), read(p))]
        each.append(order.sample(found, len(found)))
    in_turn = itertools.chain(*itertools.zip_longest(*each))
    can_be = lambda mutant: mutant is not None and is_program(mutant.of(source_of(mutant)))
    return list(itertools.islice(filter(can_be, in_turn), count))


def read(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")


def source_of(mutant: Mutant) -> str:
    return read(ROOT / mutant.file)


def key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def trace(tests: list[str], scratch: Scratch, *, file: pathlib.Path) -> dict[str, dict]:
    """Of each test file its seconds, and what it executes; kept for as long as neither it nor the package changes."""
    package = [read(path) for path in sorted((ROOT / "ladder_jax").rglob("*.py"))]
    kept = json.loads(read(file)) if file.exists() else {}
    for test in track(tests, "what tests execute"):
        name = key(test, read(ROOT / test.split("::")[0]), *package)
        if kept.get(test, {}).get("key") == name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcome = scratch.test([test], timeout=3600, lines=pathlib.Path(folder))
            noted = {line for path in pathlib.Path(folder).glob("*.lines") for line in read(path).split("\n")}
        if outcome.status not in (0, 5):  # 5: it has no test that `make test` runs
            raise SystemExit(f"{test} fails without a mutant:\n{outcome.said[-3000:]}")
        kept[test] = dict(key=name, seconds=round(outcome.seconds, 1), lines=sorted(noted))
        study.keep(kept, file=file)
    return {test: kept[test] for test in tests}


def run(chosen: list[Mutant], executed: dict[str, dict], scratch: Scratch, *, file: pathlib.Path) -> dict[Mutant, dict]:
    """What became of each mutant, a line of JSON each.

    One that is in the file is not run again, but for a survivor whose tests, or the package, have changed.
    """
    done = {}
    if file.exists():
        done = {row["key"]: row for row in map(json.loads, read(file).splitlines())}
    lines = {test: set(noted["lines"]) for test, noted in executed.items()}
    results = {}
    for mutant in track(chosen, "mutants"):
        tests = [test for test in executed if any(f"{mutant.file}:{line}" in lines[test] for line in mutant.lines)]
        tests.sort(key=lambda test: executed[test]["seconds"])
        changed = mutant.of(source_of(mutant))
        name, given = key(changed, mutant.file), key(*sorted(executed[test]["key"] for test in tests))
        if name not in done or (done[name]["survived"] and done[name]["given"] != given):
            limit = 60 + 3 * sum(executed[test]["seconds"] for test in tests)
            found = attempt(mutant, changed, tests, scratch, limit=limit)
            done[name] = dict(key=name, given=given, file=mutant.file, line=mutant.lines[0], text=mutant.text) | found
            with file.open("a", encoding="utf-8") as rows:
                rows.write(json.dumps(done[name]) + "\n")
        results[mutant] = done[name]
    return results


def attempt(mutant: Mutant, changed: str, tests: list[str], scratch: Scratch, *, limit: float) -> dict:
    """Whether the tests let it pass, or which one did not."""
    if not tests:
        return dict(survived=True, by=None, tests=0, seconds=0.0)
    with scratch.with_source(mutant.file, changed):
        outcome = scratch.test(tests, timeout=limit)
    by = None
    if outcome.status is None:
        by = "time"
    elif outcome.status != 0:
        by = killer(outcome.said)
    return dict(survived=by is None, by=by, tests=len(tests), seconds=round(outcome.seconds, 1))


def killer(said: str) -> str:
    """The test that failed, or the end of what pytest said (of a module that cannot be imported, say)."""
    for line in said.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" - ")[0].split(" ", 1)[1]
    return said.strip()[-200:]


def difference(mutant: Mutant) -> str:
    source = source_of(mutant)
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
