"""The small files of a run whose folder is in an object store: written to a local folder, and uploaded now and then.

Metrics, TensorBoard's events and profiles grow line by line, and an object can only be written as a whole. They are
uploaded before each checkpoint, at most EVERY seconds after a line, and at the end.
"""

import contextlib
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator

import jax

from ladder_jax import remote
from ladder_jax.errors import RunFailed

EVERY = 60.0  # seconds


class Mirror:
    """A local folder whose files are uploaded into `folder`. For a local run both are the same, and nothing is done."""

    def __init__(self, local: pathlib.Path, folder: remote.Path, *, say: Callable[[str], None]):
        self.local, self._folder, self._say = local, folder, say
        self._uploaded: dict[str, tuple[int, int]] = {}  # the size and time of each file
        self._last, self._failing = time.monotonic(), False

    def begin(self, *names: str, replaced: str) -> None:
        """Copy the objects `names` here, and remove those that match `replaced`. In process 0 alone."""
        if self.local == self._folder or jax.process_index() > 0:
            return
        with remote.explained(self._folder, "read"):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    (self.local / name).write_bytes((self._folder / name).read_bytes())
            for path in self._folder.glob(replaced):
                path.unlink(missing_ok=True)

    def upload(self, *, force: bool = True) -> None:
        """Upload all files that have changed. Without `force`, only EVERY seconds after the last time.

        A failure is reported once, and does not end the run: the next upload tries again.
        """
        if self.local == self._folder or not force and time.monotonic() - self._last < EVERY:
            return
        self._last = time.monotonic()
        try:
            with remote.explained(self._folder, "write into"):
                self._upload()
            self._failing = False
        except RunFailed as error:
            if not self._failing:
                self._say(f"{error}; it is tried again with the next lines")
            self._failing = True

    def _upload(self) -> None:
        files = {str(path.relative_to(self.local)): path for path in self.local.rglob("*") if path.is_file()}
        for name, path in sorted(files.items()):
            state = path.stat().st_size, path.stat().st_mtime_ns
            if self._uploaded.get(name) != state:
                (self._folder / name).write_bytes(path.read_bytes())
                self._uploaded[name] = state
        for name in self._uploaded.keys() - files.keys():
            (self._folder / name).unlink(missing_ok=True)
            del self._uploaded[name]


@contextlib.contextmanager
def mirrored(folder: remote.Path, *, say: Callable[[str], None]) -> Iterator[Mirror]:
    """Yields the Mirror of a run's folder, and uploads what is left at the end, of every process."""
    if not remote.is_remote(folder):
        yield Mirror(folder, folder, say=say)
        return
    with tempfile.TemporaryDirectory(prefix="ladder-jax-run-") as local:
        mirror = Mirror(pathlib.Path(local), folder, say=say)
        try:
            yield mirror
        finally:
            mirror.upload()
