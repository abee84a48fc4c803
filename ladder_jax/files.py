"""Paths, local or in an object store, and a command's output files, pictures among them, written
completely or not at all.
"""

import codecs
import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import pathlib
import re
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ladder_jax import remote
from ladder_jax.errors import RunFailed, UserError, error_text, needed, refused

if TYPE_CHECKING:
    from etils import epath
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
PIPE = "this is a device or a pipe; name a file"
PARTIAL = ".partial-"
"""The beginning of a file's name until it is complete."""


type AnyPath = "pathlib.Path | epath.Path"
"""A local path, or one in an object store (see remote.py), which has pathlib's methods."""


def expanded(path: str | os.PathLike) -> AnyPath:
    """A local path with `~` expanded; for gs://... and s3://... an epath.Path.

    Raises UserError for another scheme, and if the scheme's library is not installed.
    """
    if is_remote(path):
        return remote.path(os.fspath(path))
    return local_path(path)


def local_path(path: str | os.PathLike) -> pathlib.Path:
    """With `~` expanded. As in a shell, `~name` stays where there is no user of that name. `//` at
    the beginning becomes `/`: tensorstore refuses it.
    """
    return pathlib.Path(re.sub("^//+", "/", os.path.expanduser(path)))


def on_disk(path: str | os.PathLike) -> pathlib.Path:
    """As `local_path`, of what is read from and written to disks alone. Raises UserError for
    gs://... and the like, which as a path would be a folder of that name here.
    """
    if is_remote(path):
        raise UserError(f"{str(path)!r} is in an object store, and this must be on a disk")
    return local_path(path)


def absolute(path: str | os.PathLike) -> AnyPath:
    """As `expanded`, and absolute."""
    found = expanded(path)
    return found if is_remote(path) else found.absolute()


def check_storable(what: str, folder: AnyPath) -> None:
    """Raises UserError for a folder that tensorstore could not write to, or not read again."""
    if re.search(r"[\0\ud800-\udfff]|\.__lock(/|$)", str(folder)):  # \ud800-: they stand for bytes
        raise UserError(
            f"{what}{str(folder)!r} cannot hold checkpoints: the path must be UTF-8 text,"
            " and no name in it may end in .__lock"
        )


def is_remote(path: str | os.PathLike) -> bool:
    """Whether it has a scheme, as gs://bucket/name has."""
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(path)))


def below(root: pathlib.Path, *, data: bool = False) -> list[pathlib.Path]:
    """The file itself; of a folder all files in it and below, in the order of their paths.

    data: links to folders are followed, each folder once; files and folders whose names begin with
        a dot are left out.
    Raises UserError for a pipe, and for a folder below that cannot be read: its files would
    silently be left out.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # removed meanwhile
            raise UserError(f"cannot read {str(error.filename)!r}: {error.strerror}")

    if root.is_file():
        return [root]
    if is_pipe(root):
        raise UserError(f"{str(root)!r}: {PIPE}")
    found = []
    seen = set()
    for folder, folders, names in root.walk(on_error=refuse, follow_symlinks=data):
        if data:
            again = folder.resolve() in seen
            seen.add(folder.resolve())
            shown = lambda named: [one for one in named if not again and not one.startswith(".")]
            folders[:] = sorted(shown(folders))
            names = shown(names)
        found += [folder / name for name in names]
    return sorted(path for path in found if path.is_file())


def sizes(folder: AnyPath) -> dict[str, int]:
    """The bytes of all files in a folder and below, by their names in it."""
    if is_remote(folder):
        return {name: int(info["size"]) for name, info in remote.listed(folder).items()}
    return {str(path.relative_to(folder)): path.stat().st_size for path in below(folder)}


def kvstore(folder: AnyPath) -> dict[str, Any]:
    """Tensorstore's specification of a folder; it refuses `..` in a path."""
    if is_remote(folder):
        return remote.kvstore(folder)
    return {"driver": "file", "path": f"{os.path.realpath(folder)}/"}


def patiently[T](folder: str | os.PathLike, work: Callable[[], T]) -> T:
    """`work()`; where `folder` is in an object store, again until the store answers, for
    `remote.RETRIED` seconds.
    """
    return remote.patiently(work) if is_remote(folder) else work()


@contextlib.contextmanager
def explained(
    folder: str | AnyPath, doing: str, *, kind: type[Exception] = RunFailed
) -> Iterator[None]:
    """Turns the errors of a disk or an object store into one line, an error of that kind: "cannot
    `doing` 'folder': reason".
    """
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception as error:  # the stores' libraries have errors of their own, beside OSError
        if not isinstance(error, OSError) and not is_remote(folder):
            raise
        raise kind(f"cannot {doing} {str(folder)!r}: {reason(error)}") from None


def reading(file: str | AnyPath) -> contextlib.AbstractContextManager[None]:
    """Turns what reading a file that the user has named raises into a UserError; of an object store,
    which may not answer, into RunFailed.
    """
    return explained(file, "read", kind=RunFailed if is_remote(file) else UserError)


def reason(error: BaseException) -> str:
    """The cause of an error in one line: the operating system's text, or that of the innermost
    error.
    """
    while error.__cause__:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # tensorstore: anywhere in the text
    if code := re.search(r"\[os_error_code='(\d+)'\]", str(error)):
        return os.strerror(int(code[1]))
    return error_text(error)[:300]


def read_text(file: AnyPath) -> str:
    """Raises RunFailed where an object store does not answer, as nothing is wrong with the file
    then.
    """
    try:
        content = file.read_bytes()
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        if not is_remote(file):
            raise
        raise RunFailed(f"cannot read {str(file)!r}: {reason(error)}") from None
    return content.decode()


def text_of(file: str | pathlib.Path, *, named: bool, most: int = sys.maxsize) -> str | None:
    """A local file's text, without a byte order mark; None for one that is no text, unless the user
    has named it: UserError.

    most: bytes that are read.
    """
    with reading(file), open(file, "rb") as source:
        is_cut = os.fstat(source.fileno()).st_size > most
        content = source.read(most if is_cut else -1)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(content, final=not is_cut).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if named:
            raise UserError(f"{file}: not UTF-8 text, at byte {error.start}") from None
        return None


def digest(*values: Any) -> str:
    """Of JSON values, to tell whether a result or a data set is of the same ones. The order of an
    object's names does not count.
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def leads_out(file: AnyPath) -> bool:
    """Whether it is a link that leads out of its folder; in the Hub's cache, out of the model's."""
    if is_remote(file):
        return False
    root = file.parent.resolve()
    if root.parent.name == "snapshots":  # all files there are links into the cache's `blobs`
        root = root.parents[1]
    return not file.resolve().is_relative_to(root)


def is_pipe(path: pathlib.Path) -> bool:
    """Whether it is a pipe or a device: what was read of it cannot be read again."""
    return path.exists() and not path.is_file() and not path.is_dir()


def check_writable(option: str, file: str | None, *, endings: tuple[str, ...] = ()) -> None:
    """Raises UserError if `--option FILE` cannot be written, or does not end in one of
    `endings`.
    """
    if file is None:
        return
    path = pathlib.Path(file)
    folder = path.resolve().parent  # of the file that a link points to
    for wrong, why in (
        (endings and path.suffix not in endings, f"the file must end in {' or '.join(endings)}"),
        (path.is_dir(), "this is a folder; name a file in it"),
        (not path.parent.is_dir(), f"there is no folder {path.parent}"),
        (is_pipe(path), PIPE),
        (path.exists() and not os.access(path, os.W_OK), "this file cannot be written"),
        (not os.access(folder, os.W_OK), f"the folder {folder} cannot be written to"),
    ):
        if wrong:
            raise UserError(f"--{option} {file}: {why}")


def check_picture(option: str, file: str | None) -> None:
    """As `check_writable`, for a picture: also raises UserError if matplotlib is not installed."""
    check_writable(option, file, endings=PICTURES)
    if file is not None:
        pyplot(f"--{option} {file}")


def cache_folder(name: str) -> pathlib.Path | None:
    """The folder `name` in LADDER_JAX_CACHE, or else in `ladder_jax` in the user's cache folder.
    Created if missing.

    None if it cannot be written to.
    """
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    ours = os.environ.get("LADDER_JAX_CACHE") or f"{users}/ladder_jax"
    try:
        folder = pathlib.Path(ours).expanduser() / name
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


@contextlib.contextmanager
def cache(name: str) -> Iterator[pathlib.Path]:
    """`cache_folder(name)`; if that is None, a temporary folder, removed when the block ends."""
    if (folder := cache_folder(name)) is not None:
        yield folder
        return
    with temporary() as folder:
        yield folder


@contextlib.contextmanager
def temporary() -> Iterator[pathlib.Path]:
    """A temporary folder, removed when the block ends. Raises RunFailed where none can be made."""
    try:
        made = tempfile.TemporaryDirectory()
    except OSError as error:  # its text lists the folders that were tried
        raise RunFailed(f"{error.strerror}: set TMPDIR to a folder that can be written") from None
    with made as folder:
        yield pathlib.Path(folder)


@contextlib.contextmanager
def locked(file: str | pathlib.Path, *, busy: str, shared: bool = False) -> Iterator[io.FileIO]:
    """Opens a file to append to it, makes it if it is missing, and holds the system's lock of it in
    a block. The lock ends with the process, also by a kill. Raises UserError(`busy`) where another
    process has it.

    A lock of a regular file that is open for reading and writing is the only one that NFS enforces
    across hosts. On a file system without locks nobody is kept out.
    """
    with open(file, "a+b", buffering=0) as opened:
        try:
            fcntl.flock(opened, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(busy) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise
        yield opened


def write_atomically(file: str, write: Callable[[str], object]) -> None:
    """Calls `write` with a temporary path in the same folder and with the same ending, then renames
    that to `file`.

    If `file` is a link, its target is replaced. Raises RunFailed if the operating system reports an
    error.
    """
    path = pathlib.Path(file).resolve()
    try:
        partial = path.with_name(f"{PARTIAL}{uuid.uuid4().hex}{path.suffix}")
        partial.touch(exist_ok=False)
        try:
            if path.exists():
                partial.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR)
            write(str(partial))
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        raise RunFailed(f"{file} was not written: {error.strerror or error}") from error


def write(file: AnyPath, blocks: Iterable[bytes], *, sync: bool = False) -> None:
    """Writes a file, on a disk as `write_atomically` does. sync: it is on the disk when this
    returns.
    """
    if is_remote(file):
        file.write_bytes(b"".join(blocks))
        return

    def write_blocks(path: str) -> None:
        with open(path, "wb") as out:
            out.writelines(blocks)
            out.flush()
            if sync:
                os.fsync(out.fileno())

    write_atomically(str(file), write_blocks)


def panels(
    rows: int, columns: int, *, size: tuple[float, float], **shared: bool
) -> tuple["Figure", list["Axes"]]:
    """A figure of so many inches, and its panels, row by row, without frames on top and right."""
    figure, axes = pyplot().subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", **shared
    )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def write_picture(file: str, figure: "Figure") -> None:
    """Writes a figure, and closes it."""
    write_atomically(file, lambda path: figure.savefig(path, dpi=150))
    pyplot().close(figure)


def pyplot(what: str = "matplotlib.pyplot") -> ModuleType:
    """`matplotlib.pyplot`, set up to write files (no display). Raises UserError if it is not
    installed, an optional package, as only pictures need it. what: needs it, such as `--plot FILE`.
    """
    needs = f"{what}: a picture needs matplotlib"
    # where neither its own folder nor a temporary one can be written it says what to set
    with refused(needs), needed(needs, extra="plot"):
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot

        return pyplot
