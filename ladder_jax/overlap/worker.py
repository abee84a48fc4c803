"""Compile one program in a subprocess: jax reads its environment at import, and the compiler may be killed.

    python -m ladder_jax.overlap.worker REQUEST.json RESULT [DUMP]

A user's mistake is one JSON line on standard output, {"error": ...}, and exit status 2; standard error has the
compiler's log. RESULT is written completely or not at all. With DUMP, the folder named in XLA_FLAGS, the program is
compiled only until it is scheduled.
"""

import json
import logging
import os
import pathlib
import sys
import time

from ladder_jax.errors import UserError
from ladder_jax.overlap.request import Request


def main(source: str, destination: str, dump: str | None = None) -> int:
    import jax

    from ladder_jax.overlap import programs, record, scheduled

    notices: list[str] = []
    logging.getLogger("ladder_jax").addHandler(_Collect(notices))
    with open(source) as file:
        request = Request.from_dict(json.load(file))
    try:
        started = time.perf_counter()
        function, arguments = programs.program(request)
        if dump is None:
            compiled = function.compile(*arguments)
            hlo, analysis = compiled.as_text(), _analysis(compiled)
        else:
            hlo, analysis = scheduled.schedule(function, arguments=arguments, folder=pathlib.Path(dump)), _NO_ANALYSIS
    except UserError as error:
        return _refuse(str(error))
    except jax.errors.JaxRuntimeError as error:
        return _refuse(f"the compiler for {request.target.name} fails: {str(error).splitlines()[0][:400]}")
    record.write(
        destination,
        record.Record(
            hlo=hlo,
            jax=jax.__version__,
            compiler=programs.compiler(request.target),
            options=function.options,
            launch=function.traits.launch.value,
            notices=tuple(notices),
            seconds=time.perf_counter() - started,
            bytes_minimum=programs.bytes_minimum(request, arguments),
            **analysis,
        ),
    )
    return 0


def _refuse(message: str) -> int:
    print(json.dumps({"error": message}))
    return 2


def _analysis(compiled) -> dict:
    memory = compiled.memory_analysis()
    return {
        "bytes_accessed": _costs(compiled).get("bytes accessed"),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }


_NO_ANALYSIS = dict.fromkeys(
    ("bytes_accessed", "argument_bytes", "output_bytes", "alias_bytes", "temporary_bytes", "code_bytes")
)


def _costs(compiled) -> dict:
    """The compiler's cost analysis; empty if it has none (NVIDIA, ahead of time)."""
    try:
        return compiled.cost_analysis() or {}
    except (NotImplementedError, RuntimeError):
        return {}


class _Collect(logging.Handler):
    def __init__(self, notices: list[str]):
        super().__init__()
        self._notices = notices

    def emit(self, entry: logging.LogRecord) -> None:
        self._notices.append(entry.getMessage())


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no normal exit: a compiler's threads may hang at the interpreter's end
