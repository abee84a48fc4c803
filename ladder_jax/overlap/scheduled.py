"""A TPU program's schedule without its machine code, which takes nine tenths of a training step's compilation.

XLA can be asked to write a module down (`--xla_dump_to`); it does so once the order of operations is final and buffers
are assigned, before code is made from them.
"""

import pathlib
import threading
from collections.abc import Sequence

from ladder_jax.parallel import Compiled

MODULES = "jit_(step|local)"  # ours: of training, and of serving
_WRITTEN = "*.after_optimizations.txt"


def flags(folder: pathlib.Path) -> str:
    """What XLA_FLAGS must hold before jax is imported, for `schedule` to find the dump in `folder`."""
    return f"--xla_dump_to={folder} --xla_dump_hlo_as_text=true --xla_dump_hlo_module_re=.*{MODULES}.*"


def schedule(function: Compiled, *, arguments: Sequence, folder: pathlib.Path) -> str:
    """The scheduled program's text. The compiler goes on in a thread: end the process.

    Raises what the compiler raises before; what fails only while code is made (vector memory) is not seen.
    """
    ended: list[str | BaseException] = []

    def compile_whole() -> None:
        try:
            ended.append(function.compile(*arguments).as_text())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=compile_whole, daemon=True)
    thread.start()
    while thread.is_alive():
        for path in folder.glob(_WRITTEN):
            text = path.read_text(errors="replace")
            if "\nENTRY " in text and text.rstrip().endswith("\n}"):  # the entry comes last: it is whole
                return text
        thread.join(0.1)
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]
