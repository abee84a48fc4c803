"""Write a Source as a folder that Hugging Face's libraries read, completely or not at all."""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np

from ladder_jax.errors import RunFailed, UserError
from ladder_jax.pretrained import linear, source, staging, tokenizer_files
from ladder_jax.pretrained.huggingface import config_out, experts, names, read, tensors
from ladder_jax.pretrained.huggingface.tensors import Pending
from ladder_jax.pretrained.source import Key, Source

SHARD_BYTES = 5 * 10**9
"""About transformers' own limit. A larger model is written as several files and an index."""
DEFAULT_CONTEXT = 2048  # tokens, if the source has no context


def write(
    exported: Source,
    destination: pathlib.Path,
    *,
    dtype: np.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    done: Callable[[Key], object] = lambda key: None,
) -> None:
    """Write config.json, safetensors, tokenizer and generation config to the folder `destination`, new or empty.

    The files are written to a temporary folder, compared, and renamed. The host holds one array at a time.
    dtype: of all values; None keeps the stored dtypes. done: called with the key of each array after it is written.
    Raises UserError if `destination` is not empty, or the format cannot express the model, before anything is written.
    Raises RunFailed if writing fails; unfinished files are removed.
    """
    destination = destination.expanduser().absolute()
    pending, keys = _pending(source.check(exported), None if dtype is None else np.dtype(dtype))
    tensors.check_dtypes({tensor.dtype for tensor in pending.values()})
    files = _files(exported, pending)
    try:
        _write(destination, pending, files, shard_bytes, lambda name: done(keys[name]) if name in keys else None)
    except OSError as error:
        raise RunFailed(f"{str(destination)!r} could not be written: {error.strerror or error}") from error
    finally:
        experts.newest.cache_clear()


def _write(destination: pathlib.Path, pending, files: Mapping[str, bytes], limit: int, done) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    with staging.staged(destination) as folder:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        _write_tensors(folder, pending, limit, done)
        _compare(folder, pending)


def _pending(exported: Source, dtype: np.dtype | None) -> tuple[dict[str, Pending], dict[str, Key]]:
    """The tensors by name; and the key of each array by the name of its (last) tensor."""
    dims, pending, keys = source.dims(exported.model), {}, {}
    model_type = config_out.model_type(exported.model)
    for key in source.expected_shapes(exported.model):
        stored, letters = exported.arrays[key], dims[key.name]
        if exported.model.moe is not None and key.name.startswith("layers/mlp/"):
            pending |= experts.give(key, stored, model=exported.model, model_type=model_type, dtype=dtype)
        else:
            values = functools.partial(_values, stored, letters)
            shape = linear.shape(letters, stored.shape)
            pending[names.theirs(key, model=exported.model)] = Pending(shape, dtype or np.dtype(stored.dtype), values)
        keys[next(reversed(pending))] = key
    return pending, keys


def _values(stored: source.Stored, dims: str) -> np.ndarray:
    return linear.from_ours(stored.read(), dims=dims)


def _files(exported: Source, pending: Mapping[str, Pending]) -> dict[str, bytes]:
    """The contents of all files except the weights, by name."""
    dtypes = {tensor.dtype for tensor in pending.values()}
    config = config_out.describe(
        exported.model,
        dtype=functools.reduce(jnp.promote_types, dtypes),
        context=exported.context or DEFAULT_CONTEXT,
        generation=dict(exported.generation),
    )
    files = {**exported.files, read.CONFIG: config_out.to_json(config)}
    if exported.generation:
        files[read.GENERATION] = config_out.to_json(dict(exported.generation))
    if config_out.needs_program(config):
        files[config_out.MODELING] = (pathlib.Path(__file__).parent / config_out.MODELING).read_bytes()
        if tokenizer_files.MAIN in files:
            files[tokenizer_files.CONFIG] = _with_class(exported.path, files.get(tokenizer_files.CONFIG, b"{}"))
    return files


def _with_class(where: str, content: bytes) -> bytes:
    """tokenizer_config.json with a `tokenizer_class`: AutoTokenizer has no default class for our model_type."""
    try:
        config = json.loads(content)
    except ValueError as error:
        raise UserError(f"{where!r}: {tokenizer_files.CONFIG} is not JSON: {error}") from None
    return config_out.to_json({"tokenizer_class": tokenizer_files.FAST, **config})


def _write_tensors(folder: pathlib.Path, pending, limit: int, done) -> None:
    shards = list(tensors.shards(pending, limit=limit))
    weight_map = {}
    for index, shard in enumerate(shards, start=1):
        file = read.WEIGHTS if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
        for name in tensors.write(folder / file, shard):
            weight_map[name] = file
            done(name)
    if len(shards) > 1:
        total = {"total_size": sum(tensor.nbytes for tensor in pending.values())}
        (folder / read.INDEX).write_bytes(config_out.to_json({"metadata": total, "weight_map": weight_map}))


def _compare(folder: pathlib.Path, pending: Mapping[str, Pending]) -> None:
    """Raises RunFailed if a tensor reads back with other values than were written."""
    written = read.stored(folder)
    for name, tensor in pending.items():
        if not tensors.same(written[name].read(), tensor.values().astype(tensor.dtype, copy=False)):
            raise RunFailed(f"{str(written[name].file)!r}: {name} reads back with other values than were written")
