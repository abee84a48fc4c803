"""Read a ladder_jax checkpoint as a Source, for example to export it."""

import functools
import pathlib
from collections.abc import Callable

import numpy as np
import tensorstore

from ladder_jax import checkpoint
from ladder_jax.checkpoint import manifest
from ladder_jax.data import tokenizer
from ladder_jax.errors import UserError
from ladder_jax.files import kvstore
from ladder_jax.pretrained import source, tokenizer_files
from ladder_jax.pretrained.huggingface.read import read_object
from ladder_jax.pretrained.source import Key, Source, Stored

_GENERATION = "generation_config.json"  # beside a tokenizer's own files


def read(path: pathlib.Path) -> Source:
    """The checkpoint at `path` (a run's folder, its `checkpoints/`, or one step's), compared with its manifest.

    Layers are stored stacked. A converted model's are one chunk each; of a trained one's, reading one layer reads its
    whole stack, so read the arrays in the order of `source.expected_shapes`: then each stack is read once. Raises
    UserError if there is no checkpoint, and Damaged.
    """
    opened = checkpoint.open_checkpoint(path)
    if opened.has_manifest and (problems := manifest.problems(opened.path, part="params")):
        raise checkpoint.Damaged(f"checkpoint {str(opened.path)!r} is damaged or incomplete: {problems[0]}")
    model, arrays = opened.config.model, {}
    if model.side is not None:
        raise UserError(
            f"{str(path)!r} has a side network (model.side), which no other format has: generate, serve, evaluate and"
            " train read the checkpoint itself"
        )
    store = functools.cache(functools.partial(_open, opened.path / "params"))
    # Keeps the last stack only, for its other layers.
    read_stack = functools.lru_cache(maxsize=1)(lambda name: store(name).read().result())
    for key, shape in source.expected_shapes(model).items():
        dtype = store(key.name).dtype.numpy_dtype
        arrays[key] = Stored(shape, dtype, functools.partial(_values, store, read_stack, key, shape))
    folder = opened.path.parent.parent / tokenizer.FOLDER
    generation = read_object(folder / _GENERATION) if tokenizer_files.has_file(folder, _GENERATION) else {}
    return Source(
        str(path),
        model,
        arrays,
        opened.config.train.sequence,
        tokenizer_files.read(folder),
        generation,
        source.refit_in(folder.parent),
    )


def _open(folder: pathlib.Path, name: str) -> tensorstore.TensorStore:
    """Open the array `name` in the item at `folder`, without reading its values."""
    database = {"driver": "ocdbt", "base": kvstore(folder), "path": f"{name.replace('/', '.')}/"}
    try:
        return tensorstore.open({"driver": "zarr", "kvstore": database}, open=True, read=True).result()
    except ValueError as error:
        raise UserError(f"{str(folder)!r} holds no {name}: {str(error).splitlines()[0][:200]}") from None


def _values(
    store: Callable[[str], tensorstore.TensorStore],
    read_stack: Callable[[str], np.ndarray],
    key: Key,
    shape: tuple[int, ...],
) -> np.ndarray:
    """One layer of a stack, or an array without layers; without the vocabulary's and the experts' padding."""
    if key.layer is None:
        return read_stack(key.name)[: shape[0]]
    if store(key.name).chunk_layout.read_chunk.shape[0] == 1:
        return store(key.name)[key.layer].read().result()[: shape[0]]
    return read_stack(key.name)[key.layer][: shape[0]]
