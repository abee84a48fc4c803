"""`make test-changed`: the tests that an edit can reach, the nearest first, for about two minutes.

A pytest plugin (-p tests.changed). A test file reaches a module that it imports, or that one
imports which it reaches; the fewer imports between, the nearer it is. A module's name in a string
counts as an import: it is loaded when it is needed, or in a process. What a process of the fixture
`run_cli` imports does not count.
"""

import ast
import collections
import functools
import pathlib
import re
import subprocess
import time

import pytest

from tests.conftest import FIRST

ROOT = pathlib.Path(__file__).parent.parent
LATE = re.compile(r"(ladder_jax|experiments|tests)(\.\w+)+(:\w+)?")


def pytest_addoption(parser):
    group = parser.getgroup("changed")
    group.addoption(
        "--since",
        default="HEAD",
        metavar="COMMIT",
        help="what was edited since then (default: HEAD)",
    )
    group.addoption(
        "--within",
        type=float,
        default=120,
        metavar="SECONDS",
        help="begin no test later (default: 120)",
    )


def pytest_configure(config):
    config.pluginmanager.register(Changed(config), "changed-tests")


class Changed:
    """Chooses and orders tests, and begins none once the time is over."""

    def __init__(self, config):
        self.begun = time.monotonic()
        self.within = config.getoption("within")
        self.edited = edited(config.getoption("since"))
        self.distances = distances(self.edited)

    def pytest_report_header(self):
        return f"{len(self.edited)} edited files; {len(self.distances)} files of tests reach them"

    @pytest.hookimpl(trylast=True)  # the suite's own order comes before
    def pytest_collection_modifyitems(self, config, items):
        reached = [item for item in items if item.path in self.distances]
        config.hook.pytest_deselected(
            items=[item for item in items if item.path not in self.distances]
        )
        # The suite begins with its slowest files, FIRST; here they come after others that are as
        # near.
        items[:] = sorted(
            reached, key=lambda item: (self.distances[item.path], item.path.stem in FIRST)
        )

    @pytest.hookimpl(tryfirst=True)  # before fixtures are made
    def pytest_runtest_setup(self, item):
        if time.monotonic() - self.begun > self.within:
            pytest.skip("no time is left")


def edited(since):
    """Files that differ from a commit's, and new ones.

    Raises UsageError where git does not know the commit.
    """
    commands = (
        ["git", "diff", "--name-only", since, "--"],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    files = set()
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise pytest.UsageError(f"--since {since}: {done.stderr.strip().splitlines()[0]}")
        files.update(ROOT / name for name in done.stdout.splitlines())
    return files


def distances(files):
    """For each test file that reaches one of these: over how many imports; of a text that it names,
    one.
    """
    importers = collections.defaultdict(set)
    for path in sources():
        for found in imports(path):
            importers[found].add(path)
    near = dict.fromkeys(files, 0)
    queue = collections.deque(files)
    for text in files:
        if text.suffix != ".py":
            for test in (ROOT / "tests").rglob("test_*.py"):
                if text.name in test.read_text() and test not in near:
                    near[test] = 1
    while queue:
        path = queue.popleft()
        for importer in importers[path] - near.keys():
            near[importer] = near[path] + 1
            queue.append(importer)
    return {
        path: steps
        for path, steps in near.items()
        if path.name.startswith("test_") and path.exists()
    }


def sources():
    return [
        path
        for folder in ("ladder_jax", "experiments", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


@functools.cache
def imports(path, *, late=True):
    """Files of ours that a file imports, anywhere in it; a name of a package is the module of that
    name, or the package's `__init__`. late: of a module's name in a string, too.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(file_of(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.update(
                file_of(f"{node.module}.{alias.name}") or file_of(node.module)
                for alias in node.names
            )
        elif (
            late
            and isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and LATE.fullmatch(node.value)
        ):
            found.add(file_of(node.value.partition(":")[0]))
    return found - {None, path}


@functools.cache
def file_of(module):
    stem = ROOT.joinpath(*module.split("."))
    return next(
        (file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()), None
    )
