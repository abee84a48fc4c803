"""A copy of the repository in which a mutant lives while tests look for it."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent.parent
SITE = pathlib.Path(__file__).parent / "site"


@dataclasses.dataclass(frozen=True)
class Outcome:
    status: int | None  # pytest's; None: it took too long
    seconds: float
    said: str


@dataclasses.dataclass(frozen=True)
class Scratch:
    folder: pathlib.Path

    @classmethod
    def copy(cls, folder: pathlib.Path) -> "Scratch":
        """Of the files as they stand now, without what git ignores."""
        listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        return cls(folder)

    @contextlib.contextmanager
    def with_source(self, file: str, source: str):
        path = self.folder / file
        before = path.read_text(encoding="utf-8")
        path.write_text(source, encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")

    def test(self, files: list[str], *, timeout: float, lines: pathlib.Path | None = None) -> Outcome:
        """pytest, until the first failure; `lines`: the folder in which every process notes what it executes."""
        path = [str(self.folder), *([str(SITE)] if lines else [])]
        # No bytecode: a source that is written twice within a second would look unchanged.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
        if lines:
            lines.mkdir(parents=True, exist_ok=True)
            package = f"{self.folder}{os.sep}"
            environment |= {"LADDER_MUTANTS_LINES": str(lines), "LADDER_MUTANTS_PACKAGE": package}
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=timeout)
            status = process.returncode
        except subprocess.TimeoutExpired:
            status, said = None, ""
        finally:
            with contextlib.suppress(ProcessLookupError):  # with all that it started
                os.killpg(process.pid, 9)
            process.wait()
        return Outcome(status, time.monotonic() - began, said)
