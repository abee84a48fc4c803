"""Runs one command of ladder-jax in this process, and records which functions of the library it calls.

    python experiments/walk/trace.py train|generate RESULT WORD...

WORD... are the arguments of `ladder-jax`. The process ends where the walk does, with the record as JSON in RESULT.
It is a file of its own because it imports nothing but the library that PYTHONPATH leads to, which may be another
commit's.
"""

import importlib.util
import inspect
import json
import os
import pathlib
import sys
import threading
from types import CodeType

EVENT = sys.monitoring.events.PY_START


class Walk:
    """The library's functions in the order of their first calls, and the most of them that were open at once."""

    def __init__(self, library: pathlib.Path, result: pathlib.Path):
        self._library, self._result = f"{library}{os.sep}", result
        self._lock = threading.Lock()
        self._optimizer_traced = False
        self.functions: dict[CodeType, None] = {}
        self.depth = 0

    def start(self) -> None:
        sys.monitoring.use_tool_id(sys.monitoring.PROFILER_ID, "walk")
        sys.monitoring.register_callback(sys.monitoring.PROFILER_ID, EVENT, self._enter)
        sys.monitoring.set_events(sys.monitoring.PROFILER_ID, EVENT)

    def end(self) -> None:
        """Writes the record, and ends the process."""
        files: dict[str, list[str]] = {}
        with self._lock:
            for code in self.functions:
                name = code.co_filename.removeprefix(self._library)
                files.setdefault(name, []).append(code.co_qualname.replace("<locals>.", ""))
            self._result.write_text(json.dumps({"depth": self.depth, "files": files}), encoding="utf-8")
            os._exit(0)

    def _enter(self, code: CodeType, offset: int) -> object:
        if code.co_filename.startswith(self._library):
            if not code.co_flags & inspect.CO_OPTIMIZED or code.co_name.startswith("<"):
                return sys.monitoring.DISABLE  # the body of a module or a class; a lambda or a generator expression
            if depth := self._depth():
                with self._lock:
                    self.functions.setdefault(code)
                    self.depth = max(self.depth, depth)
            return None
        if code.co_qualname == "scale_by_adam.<locals>.update_fn":
            self._optimizer_traced = True
        elif self._optimizer_traced and code.co_qualname == "Compiled.__call__":
            self.end()
        return None if code.co_qualname == "Compiled.__call__" else sys.monitoring.DISABLE

    def _depth(self) -> int:
        """How many functions of the library are on this thread's stack; 0 while one of its modules is imported."""
        count, frame = 0, sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(self._library):
                if code.co_name == "<module>":
                    return 0
                count += not code.co_name.startswith("<")
            frame = frame.f_back
        return count


class Output:
    """Standard output that ends the walk with the first text."""

    def __init__(self, walk: Walk):
        self._walk = walk

    def write(self, text: str) -> int:
        if text.strip():
            self._walk.end()
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def main() -> None:
    verb, result, *words = sys.argv[1:]
    library = pathlib.Path(importlib.util.find_spec("ladder_jax").origin).parent
    walk = Walk(library, pathlib.Path(result))
    if verb == "generate":
        sys.stdout = Output(walk)
    walk.start()
    from ladder_jax.cli import main as ladder_jax

    sys.exit(f"ladder-jax {verb} ended with status {ladder_jax([verb, *words])} before its walk did")


if __name__ == "__main__":
    main()
