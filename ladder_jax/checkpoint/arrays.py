"""The arrays that lie in an item of a checkpoint: which there are, and whether they are those that are wanted."""

import itertools
import pathlib
from typing import Any

import jax
import tensorstore

from ladder_jax.errors import UserError


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Shapes by name: "layers/mlp/up"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {"/".join(str(getattr(key, "key", key)) for key in path): tuple(leaf.shape) for path, leaf in leaves}


def check_listed(folder: pathlib.Path, names: set[str]) -> None:
    """Raises ValueError where an array of `names` is not there. Reads only the list."""
    _check_listed(_keys(_open(folder)), names)


def check_readable(folder: pathlib.Path, names: set[str]) -> None:
    """Read every stored value once, a few at a time; raises ValueError for the first that is bad or missing.

    For checkpoints without a manifest. Where Orbax meets a bad value itself, it abandons the reads in flight, and
    their complaints bury the one line that the user needs.
    """
    store = _open(folder)
    keys = _keys(store)
    _check_listed(keys, names)
    for some in itertools.batched(keys, 16):
        for key, read in [(key, store.read(key)) for key in some]:
            if not read.result().value:
                raise ValueError(f"the data of {key.partition('/')[0]} is not there")


def check_shapes(stored: Any, like: Any, *, folder: pathlib.Path) -> None:
    """Refuse arrays that are missing, foreign or of another shape, but for the padded vocabulary: UserError."""
    have, want = shapes(stored), shapes(like)
    for name in sorted(have.keys() | want.keys()):
        a, b = have.get(name), want.get(name)
        padded = name.endswith("table") and a is not None and b is not None and a[1:] == b[1:]
        if a != b and not padded:
            raise UserError(f"checkpoint {str(folder)!r} does not fit its configuration: {name} is {a}, not {b}")


def _open(folder: pathlib.Path) -> tensorstore.KvStore:
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}).result()


def _keys(store: tensorstore.KvStore) -> list[str]:
    return [key.decode() for key in store.list().result()]


def _check_listed(keys: list[str], names: set[str]) -> None:
    if missing := {name.replace("/", ".") for name in names} - {key.partition("/")[0] for key in keys}:
        raise ValueError(f"{sorted(missing)[0]} is not there")
