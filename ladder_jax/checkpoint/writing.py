"""Write one step: each process writes its own shards, and process 0 completes the checkpoint.

Orbax's handlers write the arrays on disks, and arrays.py in object stores: Orbax has no S3, and in
gs:// it writes descriptions through gcsfs, which gives up within a minute. Orbax's checkpointers
are not used: they wait for other processes in barriers, which a process whose disk failed never
reaches. Here no process waits for another; `store` does, with a time-out.
"""

import asyncio
import concurrent.futures
import json
import logging
import sys
import threading
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath  # the paths that Orbax's handlers take

from ladder_jax.checkpoint import arrays, manifest
from ladder_jax.checkpoint.arrays import named
from ladder_jax.files import AnyPath, absolute, is_remote
from ladder_jax.nn import Params
from ladder_jax.nn.parameter import STACKS

type Items = Mapping[str, Params]  # pytrees of arrays, by the names of a checkpoint's items
type Texts = Mapping[str, Any]  # JSON values, by the names of its other items

# the prefix of an unfinished checkpoint's folder; messages of abandoned writes contain it
WRITING = "writing."

NEVER_BEGUN = r"coroutine 'async_serialize_from_host\..*' was never awaited"

_LOGGERS = logging.getLogger("absl"), logging.getLogger("asyncio")


class Writing:
    """Starts writing `items`, pytrees of arrays by name, into the existing folders `folder/NAME`.

    After construction the arrays have been copied, and may change. Errors are raised by `wait`.
    """

    def __init__(self, folder: AnyPath, items: Items):
        self._folder = epath.Path(folder)
        self._shapes = {item: arrays.shapes_of(tree) for item, tree in items.items()}
        self._handler = ocp.PyTreeCheckpointHandler()
        # In a thread: the caller's own may have an event loop already, as in notebooks.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            self._started = pool.submit(self._start, items)

    def wait(self, *, within: float) -> None:
        """Wait until this process's shards are written. Raises Orbax's and tensorstore's errors,
        and TimeoutError.

        The first error is raised after the others have ended: one that went on would make its
        removed folder again.
        within: seconds.
        """
        errors = []
        for commit in self._started.result():
            try:
                commit.result(timeout=within)
            # Orbax and tensorstore have no common error for a failed write
            except Exception as error:
                errors.append(error)
                if isinstance(error, TimeoutError):  # of a disk that hangs no more is to be awaited
                    break
        if errors:
            raise errors[0]

    def finish(self, texts: Texts) -> None:
        """Add the JSON items `texts` and the manifest. Called on process 0, after `wait` succeeded
        on all processes.

        It may be called again after an error: the processes' databases stay, and one transaction
        merges them.
        """
        for item, shapes in self._shapes.items():
            folder = self._folder / item
            if is_remote(folder):
                arrays.finish(folder, shapes)
            else:
                self._handler.finalize(folder)
            if missing := shapes.keys() - arrays.stored(folder).keys():
                raise ValueError(f"{min(missing)} is missing")
        for item, value in texts.items():
            folder = self._folder / item
            folder.mkdir(exist_ok=True)
            (folder / "metadata").write_text(json.dumps(value))
        manifest.write(absolute(self._folder))

    def _start(self, items: Items) -> list[ocp.future.Future]:
        if is_remote(self._folder):
            writes = []
            for item, tree in items.items():
                writes += arrays.begin(self._folder / item, named(tree))
            return writes

        async def start() -> list[ocp.future.Future]:
            commits = []
            for item, tree in items.items():
                args = ocp.args.PyTreeSave(tree, save_args=_chunks(tree))
                started = await self._handler.async_save(self._folder / item, args=args)
                commits += started or []
            return commits

        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(start())
        finally:
            loop.close()


def _chunks(tree: Params) -> Params:
    """Orbax's settings for each array: one layer of a stack per chunk, so that inference can read
    single layers.
    """

    def save_args(path, array):
        if getattr(path[0], "key", None) in STACKS:
            return ocp.SaveArgs(shard_axes=(0,))
        return ocp.SaveArgs()

    return jax.tree_util.tree_map_with_path(save_args, tree)


class Quiet:
    """Silences what Orbax and tensorstore print when a write fails: pages of it would hide our
    one-line message.

    `Store.wait` raises the error itself. Orbax also logs it in several threads, with tracebacks.
    And each write that Orbax abandons prints that its exception was never retrieved, that its event
    loop is closed, or, perhaps only when the process ends, that a part of it was never awaited.
    From construction until `close()` these messages are dropped, and no others.
    """

    def __init__(self):
        self._before = sys.unraisablehook
        sys.unraisablehook = self._hook
        for logger in _LOGGERS:
            logger.addFilter(_not_orbax)
        # stays, for the process's end
        warnings.filterwarnings("ignore", NEVER_BEGUN, RuntimeWarning)

    def close(self, *, after: float = 0.0) -> None:
        """after: seconds to wait first, without blocking, as abandoned writes may still be
        running.
        """
        if after:
            timer = threading.Timer(after, self.close)
            timer.daemon = True
            timer.start()
            return
        for logger in _LOGGERS:
            logger.removeFilter(_not_orbax)
        if sys.unraisablehook == self._hook:
            sys.unraisablehook = self._before

    def _hook(self, unraisable) -> None:
        value = unraisable.exc_value
        if not (isinstance(value, RuntimeError) and str(value) == "Event loop is closed"):
            self._before(unraisable)


def _not_orbax(record: logging.LogRecord) -> bool:
    if record.name == "asyncio":
        # the path may stand in its text alone
        error = None
        if record.exc_info:
            error = record.exc_info[1]
        return f"/{WRITING}" not in f"{record.getMessage()} {error}"
    return "orbax" not in record.pathname
