"""Writes the arrays of a checkpoint's items: on disks by Orbax, in object stores by arrays.py.

Orbax has no S3, and in gs:// it writes descriptions through gcsfs, which gives up within a minute.
Its checkpointers are not used: they wait for other processes in barriers, which a process whose
disk failed never reaches. Here no process waits for another; `store` does, with a time-out.
"""

import asyncio
import concurrent.futures
import ctypes
import functools
import logging
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath  # the paths that Orbax's handlers take

from ladder_jax.checkpoint import arrays
from ladder_jax.files import AnyPath, is_remote
from ladder_jax.nn import Params
from ladder_jax.nn.parameter import STACKS

NEVER_BEGUN = r"coroutine 'async_serialize_from_host\..*' was never awaited"
LEAST_PART = 1 << 20  # bytes: a smaller part is written sooner than its program is compiled
# in the paths of what is written; messages of abandoned writes contain it
PART = re.compile(r"/(ocdbt\.)?process_\d")

type Write = Any  # a future of Orbax or tensorstore: `result(timeout=seconds)`


def begin(folder: AnyPath, tree: Params) -> list[Write]:
    """Copies this process's shards to the host, and starts to write them into `folder`."""
    if is_remote(folder):
        return arrays.begin(folder, arrays.named(tree))
    folder.mkdir(exist_ok=True)

    async def start() -> list[Write]:
        args = ocp.args.PyTreeSave(tree, save_args=_chunks(tree))
        return await _handler().async_save(epath.Path(folder), args=args) or []

    # In a thread: the caller's own may have an event loop already, as in notebooks.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, start()).result()


def await_all(writes: Sequence[Write], *, within: float) -> None:
    """Wait for writes. Raises the first error after the others have ended: one that went on would
    make its removed folder again. within: seconds.
    """
    errors = []
    for write in writes:
        try:
            write.result(timeout=within)
        # Orbax and tensorstore have no common error for a failed write
        except Exception as error:
            errors.append(error)
            if isinstance(error, TimeoutError):  # of a disk that hangs no more is to be awaited
                break
    if errors:
        raise errors[0]


def give_back_memory() -> None:
    """Gives the memory that a save has freed back to the system. glibc keeps it, in parts for each
    thread that wrote: without this a process grows with each of its first saves.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # other libraries have none
        trim(0)


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Orbax's. Each replica of a shard writes a part of it, which a compiled program cuts; where
    the parts are smaller than LEAST_PART, one replica writes the whole.
    """
    of_arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=LEAST_PART)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, of_arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _chunks(tree: Params) -> Params:
    """Orbax's settings for each array: one layer of a stack per chunk, so that inference can read
    single layers.
    """

    def save_args(path, array):
        if getattr(path[0], "key", None) in STACKS:
            return ocp.SaveArgs(shard_axes=(0,))
        return ocp.SaveArgs()

    return jax.tree_util.tree_map_with_path(save_args, tree)


def quieten() -> None:
    """From now on drops what Orbax and asyncio print where a write fails.

    Pages of it, also of writes that Orbax abandons, some of them when the process ends, would hide
    our one line: `Store` reports the error itself.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_others)
    warnings.filterwarnings("ignore", NEVER_BEGUN, RuntimeWarning)
    before = sys.unraisablehook
    if getattr(before, "func", None) is not _tell_others:
        sys.unraisablehook = functools.partial(_tell_others, before)


def _tell_others(tell: Callable[[Any], None], unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        tell(unraisable)


def _is_others(record: logging.LogRecord) -> bool:
    if record.name != "asyncio":
        return "orbax" not in record.pathname
    # the path may stand in its error alone
    error = record.exc_info[1] if record.exc_info else ""
    return not PART.search(f"{record.getMessage()} {error}")
