"""Write one step: each process writes its own shards, and process 0 completes the checkpoint.

No process waits for another here, as one whose disk failed would never come: `store` waits, with a time-out.
"""

import json
from collections.abc import Mapping
from typing import Any

from ladder_jax.checkpoint import arrays, manifest
from ladder_jax.files import AnyPath
from ladder_jax.nn import Params


class Writing:
    """Writes `items`, pytrees of arrays by name, into the existing folders `folder/NAME`.

    After construction the arrays have been copied to the host, and may change.
    """

    def __init__(self, folder: AnyPath, items: Mapping[str, Params]):
        self._folder = folder
        self._items = {item: _copied(tree) for item, tree in items.items()}

    def write(self, *, within: float) -> None:
        """Write this process's shards. Raises tensorstore's errors, and TimeoutError.

        within: seconds.
        """
        for item, copies in self._items.items():
            arrays.write(self._folder / item, copies, within=within)

    def finish(self, texts: Mapping[str, Any]) -> None:
        """Add the JSON items `texts` and the manifest. Called on process 0, after `write` succeeded on all processes.

        It may be called again after an error: the processes' databases stay, and one transaction merges them.
        """
        for item, copies in self._items.items():
            shapes = {name: copy.like.shape for name, copy in copies.items()}
            arrays.finish(self._folder / item, shapes)
            if missing := shapes.keys() - arrays.stored(self._folder / item).keys():
                raise ValueError(f"{min(missing)} is missing")
        for item, value in texts.items():
            (self._folder / item).mkdir(exist_ok=True)
            (self._folder / item / "metadata").write_text(json.dumps(value))
        manifest.write(self._folder)


def _copied(tree: Params) -> dict[str, arrays.Copied]:
    return {name: arrays.copied(array) for name, array in arrays.named(tree).items()}
