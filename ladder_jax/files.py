"""Files that a command writes: checked before the work, written whole or not at all."""

import contextlib
import os
import pathlib
import stat
import tempfile
from collections.abc import Callable, Iterator

from ladder_jax import pyplot
from ladder_jax.errors import RunFailed, UserError

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
    if path.exists() and not path.is_file():
        raise UserError(f"--{option} {file}: this is a device or a pipe; name a file")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise UserError(f"--{option} {file}: this file cannot be read and written")
    folder = path.resolve().parent  # a link's own place is not where its file is written
    if not os.access(folder, os.W_OK):
        raise UserError(f"--{option} {file}: the folder {folder} cannot be written to")


def check_picture(option: str, file: str | None) -> None:
    """Raises UserError where `--option FILE` could not be drawn, as `check_writable` does."""
    check_writable(option, file, endings=PICTURES)
    if file is not None:
        pyplot.check_installed(f"--{option} {file}")


def check_apart(**named: str | None) -> None:
    """Raises UserError where two options name the same file."""
    seen: dict[pathlib.Path, str] = {}
    for option, file in named.items():
        path = None if file is None else pathlib.Path(file).resolve()
        if path in seen:
            raise UserError(f"--{option} {file}: --{seen[path]} is the same file")
        if path:
            seen[path] = option


def cache_folder(name: str) -> pathlib.Path | None:
    """`name` in LADDER_JAX_CACHE, or in ladder_jax in the user's cache folder; None where that cannot be written to."""
    told = os.environ.get("LADDER_JAX_CACHE")
    try:
        users = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        folder = (pathlib.Path(told) if told else users.expanduser() / "ladder_jax") / name
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # of expanduser: there is no home
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


@contextlib.contextmanager
def cache(name: str) -> Iterator[pathlib.Path]:
    """`cache_folder`; where there is none, a folder that is gone in the end."""
    if (folder := cache_folder(name)) is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


def write_atomically(file: str, write: Callable[[str], object]) -> None:
    """`write` is given a path beside `file`, with its ending; that becomes `file` once it has returned.

    A link stays, and what it leads to is written. Raises RunFailed where the system refuses.
    """
    path = pathlib.Path(file).resolve()
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-", suffix=path.suffix)
        os.close(handle)
        try:
            _as_before(path, partial)
            write(partial)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        raise RunFailed(f"{file} was not written: {error.strerror or error}") from error


def _as_before(path: pathlib.Path, partial: str) -> None:
    """`partial`, which only this user may read, becomes readable for who may read `path`, or a new file."""
    if path.exists():
        os.chmod(partial, stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR)
        return
    os.unlink(partial)
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))  # the system takes the umask away
