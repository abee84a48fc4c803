"""Write one step: each process writes its own shards, and process 0 completes the checkpoint.

Orbax's checkpointers would wait for other processes in barriers, which a process whose disk failed
never reaches. Here no process waits for another; `store` does, with a time-out.
"""

import concurrent.futures
import json
from collections.abc import Mapping
from typing import Any

import tensorstore

from ladder_jax.checkpoint import arrays, manifest
from ladder_jax.checkpoint.arrays import named
from ladder_jax.files import AnyPath
from ladder_jax.nn import Params


class Writing:
    """Starts writing `items`, pytrees of arrays by name, into the existing folders `folder/NAME`.

    After construction the arrays have been copied, and may change. Errors are raised by `wait`.
    """

    def __init__(self, folder: AnyPath, items: Mapping[str, Params]):
        self._folder = folder
        self._shapes = {
            item: {name: leaf.shape for name, leaf in named(tree).items()}
            for item, tree in items.items()
        }
        # its future keeps an error for `wait`
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            self._started = pool.submit(self._start, items)

    def wait(self, *, within: float) -> None:
        """Wait until this process's shards are written. Raises tensorstore's errors, and
        TimeoutError.

        The first error is raised after the others have ended: one that went on would make its
        removed folder again.
        within: seconds.
        """
        errors = []
        for commit in self._started.result():
            try:
                commit.result(timeout=within)
            # tensorstore has no common error for a failed write
            except Exception as error:
                errors.append(error)
                if isinstance(error, TimeoutError):  # of a disk that hangs no more is to be awaited
                    break
        if errors:
            raise errors[0]

    def finish(self, texts: Mapping[str, Any]) -> None:
        """Add the JSON items `texts` and the manifest. Called on process 0, after `wait` succeeded
        on all processes.

        It may be called again after an error: the processes' databases stay, and one transaction
        merges them.
        """
        for item, shapes in self._shapes.items():
            arrays.finish(self._folder / item, shapes)
            if missing := shapes.keys() - arrays.stored(self._folder / item).keys():
                raise ValueError(f"{min(missing)} is missing")
        for item, value in texts.items():
            (self._folder / item).mkdir(exist_ok=True)
            (self._folder / item / "metadata").write_text(json.dumps(value))
        manifest.write(self._folder)

    def _start(self, items: Mapping[str, Params]) -> list[tensorstore.Future]:
        return [
            write
            for item, tree in items.items()
            for write in arrays.begin(self._folder / item, named(tree))
        ]
