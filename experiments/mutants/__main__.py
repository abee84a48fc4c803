"""Would `make test` notice? Random mutants of the package's core, each against the test files that
execute it.

    python -m experiments.mutants                          # a hundred; goes on where it stood
    python -m experiments.mutants --count 10 --tests tests/test_residual.py tests/test_numerics.py
    python -m experiments.mutants --list                   # the mutants, without running anything

First each test file runs once, in a process of its own, and notes which lines of the package it and
the processes that it starts execute. Then a mutant is written into a copy of the repository, and
the files that execute its line run, the quickest first, until a test fails: killed. A test that
does not execute the line cannot kill it. What takes over three times as long as without the mutant
counts as killed too. Mutants are of functions' bodies, as many of each package.
"""

import contextlib
import difflib
import hashlib
import itertools
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

from rich.progress import track

from experiments import study
from experiments.mutants.operators import Mutant, mutants

ROOT = pathlib.Path(__file__).parent.parent.parent
PACKAGES = ("residual", "nn", "parallel", "schedule", "train", "decode", "checkpoint")
GOAL = 0.9


def main() -> None:
    parser = study.parser(__doc__, name="mutants")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tests", nargs="+", metavar="FILE[::TEST]", help="only these (default: all of make test)"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=ROOT / ".cache" / "mutants",
        help="where results are kept",
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    args = parser.parse_args()
    chosen = choose(count=args.count, seed=args.seed)
    if args.list:
        print(*map(difference, chosen), sep="\n")
        return
    tests = args.tests or sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")
    )
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        scratch = pathlib.Path(folder)
        copy(scratch)
        executed = trace(tests, scratch, file=args.out / "lines.json")
        results = run(chosen, executed, scratch, file=args.out / "results.json")
    report(results)


def choose(*, count: int, seed: int) -> list[Mutant]:
    """As many of each package, at random; the first ones of a larger `count` are those of a smaller
    one.
    """
    order = random.Random(seed)
    each = []
    for package in PACKAGES:
        paths = sorted((ROOT / "ladder_jax" / package).rglob("*.py"))
        found = [
            mutant
            for path in paths
            for mutant in mutants(str(path.relative_to(ROOT)), path.read_text())
        ]
        each.append(order.sample(found, len(found)))
    in_turn = itertools.chain(*itertools.zip_longest(*each))
    return list(itertools.islice(filter(None, in_turn), count))


# A copy of the repository, in which tests run.


def copy(folder: pathlib.Path) -> None:
    """The files as they stand now, without what git ignores."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def pytest(
    tests: list[str], scratch: pathlib.Path, *, timeout: float, lines: str | None = None
) -> tuple[int | None, str]:
    """Its status until the first failure, or None where it took too long, and what it said.

    lines: the folder in which every process notes what it executes.
    """
    # No bytecode: a source that is written twice within a second would look unchanged.
    environment = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"), **os.environ}
    environment |= {"PYTHONPATH": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    if lines:
        site = pathlib.Path(__file__).parent / "site"
        environment |= {
            "LADDER_MUTANTS_LINES": lines,
            "LADDER_MUTANTS_PACKAGE": f"{scratch}{os.sep}",
        }
        environment |= {"PYTHONPATH": f"{scratch}{os.pathsep}{site}"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(
        command, cwd=scratch, env=environment, start_new_session=True, **pipes
    )
    try:
        said, _ = process.communicate(timeout=timeout)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):  # with all that it started
            os.killpg(process.pid, 9)
        process.wait()


# What tests execute, and what became of each mutant.


def key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def kept(file: pathlib.Path) -> dict:
    return study.load(file) if file.exists() else {}


def trace(tests: list[str], scratch: pathlib.Path, *, file: pathlib.Path) -> dict[str, dict]:
    """Of each test file its seconds, and what it executes; kept for as long as neither it nor the
    package changes.
    """
    package = [path.read_text() for path in sorted((ROOT / "ladder_jax").rglob("*.py"))]
    found = kept(file)
    for test in track(tests, "what tests execute"):
        name = key(test, (ROOT / test.split("::")[0]).read_text(), *package)
        if found.get(test, {}).get("key") == name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            status, said = pytest([test], scratch, timeout=3600, lines=folder)
            seconds = time.monotonic() - began
            noted = {
                line
                for path in pathlib.Path(folder).glob("*.lines")
                for line in path.read_text().split("\n")
            }
        if status not in (0, 5):  # 5: it has no test that `make test` runs
            raise SystemExit(f"{test} fails without a mutant:\n{said[-3000:]}")
        found[test] = dict(key=name, seconds=round(seconds, 1), lines=sorted(noted))
        study.keep(found, file=file)
    return {test: found[test] for test in tests}


def run(
    chosen: list[Mutant], executed: dict[str, dict], scratch: pathlib.Path, *, file: pathlib.Path
) -> dict[Mutant, dict]:
    """What became of each mutant.

    One that is in the file is not run again, but for a survivor whose tests, or the package, have
    changed.
    """
    done = kept(file)
    results = {}
    lines = {test: set(noted["lines"]) for test, noted in executed.items()}
    for mutant in track(chosen, "mutants"):
        places = {f"{mutant.file}:{line}" for line in mutant.lines}
        tests = [test for test in executed if places & lines[test]]
        tests.sort(key=lambda test: executed[test]["seconds"])
        changed = mutant.of((ROOT / mutant.file).read_text())
        name = key(changed, mutant.file)
        given = key(*sorted(executed[test]["key"] for test in tests))
        before = done.get(name, {"survived": True})
        if before["survived"] and before.get("given") != given:
            limit = 60 + 3 * sum(executed[test]["seconds"] for test in tests)
            by = killer(mutant, changed, tests, scratch, limit=limit)
            done[name] = dict(given=given, survived=by is None, by=by, tests=len(tests))
            study.keep(done, file=file)
        results[mutant] = done[name]
    return results


def killer(
    mutant: Mutant, changed: str, tests: list[str], scratch: pathlib.Path, *, limit: float
) -> str | None:
    """The test that fails, "time", or the end of what pytest said (of a module that cannot be
    imported, say).
    """
    if not tests:
        return None
    path = scratch / mutant.file
    before = path.read_text()
    path.write_text(changed)
    try:
        status, said = pytest(tests, scratch, timeout=limit)
    finally:
        path.write_text(before)
    if status is None:
        return "time"
    failed = re.search("^(?:FAILED|ERROR) (.*?)(?: - |$)", said, re.M)
    return None if status == 0 else failed[1] if failed else said.strip()[-200:]


def difference(mutant: Mutant) -> str:
    source = (ROOT / mutant.file).read_text()
    before = source.splitlines()
    after = mutant.of(source).splitlines()
    return "\n".join(
        difflib.unified_diff(before, after, mutant.file, mutant.file, n=1, lineterm="")
    )


def report(results: dict[Mutant, dict]) -> None:
    survivors = {mutant: row for mutant, row in results.items() if row["survived"]}
    for mutant, row in survivors.items():
        print(f"{difference(mutant)}\nsurvived {row['tests']} test files\n")
    killed = len(results) - len(survivors)
    print(
        f"{killed} of {len(results)} mutants killed ({killed / len(results):.0%}; the goal is {GOAL:.0%})"
    )
    sys.exit(killed < GOAL * len(results))


if __name__ == "__main__":
    main()
