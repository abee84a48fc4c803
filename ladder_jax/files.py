"""Files that a command writes: checked before the work, written whole or not at all."""

import os
import pathlib
import tempfile
from collections.abc import Callable

from ladder_jax.errors import UserError

PICTURES = (".png", ".svg", ".pdf")


def check_writable(option: str, file: str | None, *, endings: tuple[str, ...] = ()) -> None:
    """Raises UserError where `--option FILE` could not be written, or its ending is none of `endings`."""
    if file is None:
        return
    path = pathlib.Path(file)
    if endings and path.suffix not in endings:
        raise UserError(f"--{option} {file}: the file must end in {' or '.join(endings)}")
    if path.is_dir():
        raise UserError(f"--{option} {file}: this is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UserError(f"--{option} {file}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--{option} {file}: the folder {path.parent} cannot be written to")


def cache_folder() -> pathlib.Path:
    """LADDER_JAX_CACHE, or ladder_jax in the user's cache folder."""
    default = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ladder_jax"
    return pathlib.Path(os.environ.get("LADDER_JAX_CACHE") or default)


def write_atomically(file: str, write: Callable[[str], object]) -> None:
    """`write` is given a path beside `file`, with its ending; that becomes `file` once it has returned."""
    path = pathlib.Path(file)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-", suffix=path.suffix)
    os.close(handle)
    try:
        write(partial)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
