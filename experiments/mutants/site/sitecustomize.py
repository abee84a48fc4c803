"""Notes which lines of the package this process executes: found on the PYTHONPATH by it and all
that it starts.

LADDER_MUTANTS_LINES: the folder for a file of "name:line" lines, written at the end. A process that
is killed, or may write no files, leaves none.
"""

import atexit
import contextlib
import os
import pathlib
import sys


def _note(folder: str, package: str) -> None:
    seen, monitoring = set(), sys.monitoring

    def line(code, number):
        if code.co_filename.startswith(package):
            seen.add(f"{code.co_filename[len(package) :]}:{number}")
        return monitoring.DISABLE  # once is enough

    def write():
        with contextlib.suppress(OSError):
            pathlib.Path(folder, f"{os.getpid()}.lines").write_text("\n".join(sorted(seen)))

    monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutants")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, line)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)
    atexit.register(write)


if "LADDER_MUTANTS_LINES" in os.environ:
    _note(os.environ["LADDER_MUTANTS_LINES"], os.environ["LADDER_MUTANTS_PACKAGE"])
