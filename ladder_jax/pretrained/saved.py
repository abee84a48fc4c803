"""One of our own checkpoints as a Source, to be exported."""

import functools
import pathlib
from collections.abc import Callable

import numpy as np
import tensorstore

from ladder_jax import checkpoint
from ladder_jax.checkpoint import manifest
from ladder_jax.data import tokenizer
from ladder_jax.errors import UserError
from ladder_jax.pretrained import source, tokenizer_files
from ladder_jax.pretrained.huggingface.read import read_object
from ladder_jax.pretrained.source import Key, Source, Stored

_GENERATION = "generation_config.json"  # beside a tokenizer's own files


def read(path: pathlib.Path) -> Source:
    """The checkpoint at `path` (a run's folder, its `checkpoints/`, or one step's), its files compared with their list.

    Layers lie stacked there, so reading one reads its stack: go through the arrays in `source.wanted`'s order, and
    each stack is read once. Raises UserError where there is none, and Damaged.
    """
    found = checkpoint.open_checkpoint(path)
    if found.has_manifest and (wrong := manifest.problems(found.path, part="params")):
        raise checkpoint.Damaged(f"checkpoint {str(found.path)!r} is damaged or incomplete: {wrong[0]}")
    model, arrays = found.config.model, {}
    opened = functools.cache(functools.partial(_open, found.path / "params"))
    # What was decoded for one layer is there for the next, and goes before another is.
    whole = functools.lru_cache(maxsize=1)(lambda name: opened(name).read().result())
    for key, shape in source.wanted(model).items():
        arrays[key] = Stored(shape, opened(key.name).dtype.numpy_dtype, functools.partial(_values, whole, key, shape))
    folder = found.path.parent.parent / tokenizer.FOLDER
    generation = read_object(folder / _GENERATION) if tokenizer_files.is_held(folder, _GENERATION) else {}
    return Source(str(path), model, arrays, found.config.train.sequence, tokenizer_files.read(folder), generation)


def _open(folder: pathlib.Path, name: str) -> tensorstore.TensorStore:
    """An array of an item, its values not read."""
    base = {"driver": "file", "path": f"{folder}/"}
    place = {"driver": "ocdbt", "base": base, "path": f"{name.replace('/', '.')}/"}
    try:
        return tensorstore.open({"driver": "zarr", "kvstore": place}, open=True, read=True).result()
    except ValueError as error:
        raise UserError(f"{str(folder)!r} holds no {name}: {str(error).splitlines()[0][:200]}") from None


def _values(whole: Callable[[str], np.ndarray], key: Key, shape: tuple[int, ...]) -> np.ndarray:
    return whole(key.name)[: shape[0]] if key.layer is None else whole(key.name)[key.layer]
