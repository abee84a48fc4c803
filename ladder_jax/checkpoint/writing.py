"""Write one step: each process writes its own shards, and process 0 completes the checkpoint.

Orbax's handlers write the arrays, and where they cannot, s3.py. Orbax's checkpointers are not used: they wait for
other processes in barriers, which a process whose disk failed never reaches. Here no process waits for another; `store`
does, with a time-out.
"""

import asyncio
import concurrent.futures
import json
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath  # the paths that Orbax's handlers take

from ladder_jax.checkpoint import manifest
from ladder_jax.checkpoint.saved import check_listed, named
from ladder_jax.files import AnyPath, absolute, by_orbax
from ladder_jax.nn import Params
from ladder_jax.nn.parameter import STACKS


class Writing:
    """Starts writing `items`, pytrees of arrays by name, into the existing folders `folder/NAME`.

    After construction the arrays have been copied, and may change. Errors are raised by `wait`.
    """

    def __init__(self, folder: AnyPath, items: Mapping[str, Params]):
        self._folder = epath.Path(folder)
        self._shapes = {item: {name: leaf.shape for name, leaf in named(tree).items()} for item, tree in items.items()}
        self._handler = ocp.PyTreeCheckpointHandler()
        # In a thread: the caller's own may have an event loop already, as in notebooks.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            self._started = pool.submit(self._start, items)

    def wait(self, *, within: float) -> None:
        """Wait until this process's shards are written. Raises Orbax's and tensorstore's errors, and TimeoutError.

        The first error is raised after the others have ended: one that went on would make its removed folder again.
        within: seconds.
        """
        errors = []
        for commit in self._started.result():
            try:
                commit.result(timeout=within)
            except Exception as error:  # Orbax and tensorstore have no common error for a failed write
                errors.append(error)
                if isinstance(error, TimeoutError):  # of a disk that hangs no more is to be awaited
                    break
        if errors:
            raise errors[0]

    def finish(self, texts: Mapping[str, Any]) -> None:
        """Add the JSON items `texts` and the manifest. Called on process 0, after `wait` succeeded on all processes.

        It may be called again after an error: the processes' databases stay, and one transaction merges them.
        """
        for item, shapes in self._shapes.items():
            if by_orbax(self._folder):
                self._handler.finalize(self._folder / item)
            else:
                from ladder_jax.checkpoint import s3

                s3.finish(self._folder / item, shapes)
            check_listed(self._folder / item, set(shapes))
        for item, value in texts.items():
            (self._folder / item).mkdir(exist_ok=True)
            (self._folder / item / "metadata").write_text(json.dumps(value))
        manifest.write(absolute(self._folder))

    def _start(self, items: Mapping[str, Params]) -> list[ocp.future.Future]:
        if not by_orbax(self._folder):
            from ladder_jax.checkpoint import s3

            return [write for item, tree in items.items() for write in s3.begin(self._folder / item, named(tree))]

        async def start() -> list[ocp.future.Future]:
            commits = []
            for item, tree in items.items():
                commits += (
                    await self._handler.async_save(
                        self._folder / item, args=ocp.args.PyTreeSave(tree, save_args=_chunks(tree))
                    )
                    or []
                )
            return commits

        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(start())
        finally:
            loop.close()


def _chunks(tree: Params) -> Params:
    """Orbax's settings for each array: one layer of a stack per chunk, so that inference can read single layers."""

    def save_args(path, array):
        return ocp.SaveArgs(shard_axes=(0,) if getattr(path[0], "key", None) in STACKS else ())

    return jax.tree_util.tree_map_with_path(save_args, tree)
