"""`python -m tests.fuzz READER FIRST LAST`: feeds the inputs FIRST to LAST - 1 to a reader ("all"
for every one).

Each input is a function of the reader's name and its number. Within SECONDS of this process's time
and BYTES of memory a reader accepts it, or raises UserError with one line. Otherwise the error is
printed, with the input's number; an input that ends the process, or never returns, is the number
printed last, and its folder is left in place.
"""

import contextlib
import pathlib
import random
import resource
import signal
import sys
import tempfile
import traceback

from ladder_jax.errors import UserError, one_line
from tests.fuzz.readers import READERS

SECONDS = 5
BYTES = 2**30
SHOWN = 20  # errors, after which a reader's inputs are left


class Late(BaseException):
    """An input took more than SECONDS. (One that took more than BYTES is a MemoryError.)"""


def main(names, first, last):
    signal.signal(signal.SIGPROF, _late)
    failed = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            errors = _feed(name, READERS[name], pathlib.Path(folder), range(first, last))
        failed += errors
        print(f"{name}: {last - first} inputs, {errors} errors", flush=True)
    return int(failed > 0)


def _feed(name, reader, folder, inputs):
    reader.make(folder)
    whole = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    # imports what is imported late, which is no input's time or memory
    for changed in reader.damage:
        _outcome(reader, folder, changed)
    errors = 0
    for number in inputs:
        rng = random.Random(f"{name} {number}")
        changed = rng.choice(list(reader.damage))
        content = reader.damage[changed](rng, whole[folder / changed])
        (folder / changed).write_bytes(content)
        print(f"\r{name} {number} ", end="", file=sys.stderr, flush=True)
        with _limits():
            error = _outcome(reader, folder, changed)
        for file, content in whole.items():
            if not file.exists() or file == folder / changed or file.stat().st_size != len(content):
                file.write_bytes(content)
        if error:
            errors += 1
            print(f"{name} {number} ({changed}): {error}", flush=True)
            if errors == SHOWN:
                break
    return errors


def _outcome(reader, folder, changed):
    """What went wrong; None if the reader accepted the files, or refused them in one line."""
    try:
        reader.read(folder, changed)
    except UserError as error:
        text = one_line(str(error))
        return None if text.isprintable() else f"not one line but {text[:300]!r}"
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "ladder_jax/" in frame.filename] or frames
        place = f"{ours[-1].filename.rpartition('ladder_jax/')[2]}:{ours[-1].lineno}"
        return f"{type(error).__name__}: {str(error)[:200]}, in {place}"
    return None


@contextlib.contextmanager
def _limits():
    """Within the block, time and memory are limited, from what the process uses at its
    beginning.
    """
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, most))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def _late(*_):
    raise Late(f"more than {SECONDS} s")


if __name__ == "__main__":
    name, first, last = sys.argv[1:]
    sys.exit(main(list(READERS) if name == "all" else [name], int(first), int(last)))
