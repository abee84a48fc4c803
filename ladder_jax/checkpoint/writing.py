"""Writes one step: each process its own shards, which process 0 then completes to a checkpoint.

Orbax's handlers write the arrays. Its checkpointers would wait for the other processes in barriers, which a process
whose disk fails never enters. Here no process waits for another; `store` does, with a time-out.
"""

import asyncio
import concurrent.futures
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath  # the paths that Orbax's handlers take

from ladder_jax.checkpoint import manifest
from ladder_jax.checkpoint.saved import array_shapes, check_listed
from ladder_jax.nn import Params


class Writing:
    """Writes `items`, trees of arrays by name, into the existing folders of their names in `folder`.

    The constructor copies the arrays, which the caller may then change. Errors are raised by `wait`.
    """

    def __init__(self, folder: pathlib.Path, items: Mapping[str, Params]):
        self._folder = epath.Path(folder)
        self._names = {item: set(array_shapes(tree)) for item, tree in items.items()}
        self._handler = ocp.PyTreeCheckpointHandler()
        # In a thread, as the caller's may run an event loop already, for example in a notebook.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            self._begun = pool.submit(self._begin, items)

    def wait(self, *, within: float) -> None:
        """Waits until this process's part is written. Raises the errors of Orbax and tensorstore, and TimeoutError."""
        for commit in self._begun.result():
            commit.result(timeout=within)

    def finish(self, texts: Mapping[str, Any]) -> None:
        """In one process, after `wait` has returned in all: adds the JSON items `texts`, and the manifest."""
        for item, names in self._names.items():
            self._handler.finalize(self._folder / item)
            check_listed(pathlib.Path(self._folder / item), names)
        for item, value in texts.items():
            (self._folder / item).mkdir()
            (self._folder / item / "metadata").write_text(json.dumps(value), encoding="utf-8")
        manifest.write(pathlib.Path(self._folder))

    def _begin(self, items: Mapping[str, Params]) -> list[ocp.future.Future]:
        async def begin() -> list[ocp.future.Future]:
            begun = []
            for item, tree in items.items():
                begun += (
                    await self._handler.async_save(
                        self._folder / item, args=ocp.args.PyTreeSave(tree, save_args=_chunks(tree))
                    )
                    or []
                )
            return begun

        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(begin())
        finally:
            loop.close()


def _chunks(tree: Params) -> Params:
    """A chunk holds one layer of a stack, so that inference can read one."""

    def of(path, array):
        return ocp.SaveArgs(shard_axes=(0,) if getattr(path[0], "key", None) == "layers" else ())

    return jax.tree_util.tree_map_with_path(of, tree)
