"""Get a TPU program's schedule without waiting for its machine code, which takes 90 % of a train step's compilation.

XLA dumps a module (`--xla_dump_to`) once the order of operations is final and buffers are assigned, before it generates
machine code.
"""

import pathlib
import threading
from collections.abc import Sequence

from ladder_jax.parallel import Compiled

MODULES = "jit_(step|local)"  # the library's programs: training, and serving
_WRITTEN = "*.after_optimizations.txt"


def flags(folder: pathlib.Path) -> str:
    """Flags to put into XLA_FLAGS before jax is imported, so that XLA writes the dump of `schedule` to `folder`."""
    return f"--xla_dump_to={folder} --xla_dump_hlo_as_text=true --xla_dump_hlo_module_re=.*{MODULES}.*"


def schedule(function: Compiled, *, arguments: Sequence, folder: pathlib.Path) -> str:
    """The scheduled program's text. The compiler still runs in a thread afterwards: the caller ends the process.

    Raises the compiler's error if it fails before the dump. Later errors, such as too little vector memory, go unseen.
    """
    outcome: list[str | BaseException] = []

    def compile_whole() -> None:
        try:
            outcome.append(function.compile(*arguments).as_text())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=compile_whole, daemon=True)
    thread.start()
    while thread.is_alive():
        for path in folder.glob(_WRITTEN):
            text = path.read_text(errors="replace")
            if "\nENTRY " in text and text.rstrip().endswith("\n}"):  # the entry comes last, so the file is complete
                return text
        thread.join(0.1)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
