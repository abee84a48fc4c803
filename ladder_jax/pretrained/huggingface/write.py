"""A Source as a folder that Hugging Face's libraries read: whole, or not there."""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np

from ladder_jax.errors import RunFailed, UserError
from ladder_jax.pretrained import linear, source, staging, tokenizer_files
from ladder_jax.pretrained.huggingface import config_out, names, read, tensors
from ladder_jax.pretrained.huggingface.tensors import Pending
from ladder_jax.pretrained.source import Key, Source

SHARD_BYTES = 5 * 10**9
"""Transformers' own limit, about: what is larger is several files and an index."""
DEFAULT_CONTEXT = 2048  # tokens, where the source does not say


def write(
    given: Source,
    destination: pathlib.Path,
    *,
    dtype: np.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    done: Callable[[Key], object] = lambda key: None,
) -> None:
    """Write config.json, safetensors, tokenizer and generation config to the folder `destination`, new or empty.

    Written beside it, compared, and renamed when it is whole; the host holds one array at a time.
    dtype: of all values; None keeps each as it is stored. done: told of each array once it is written.
    Raises UserError where something lies there, or the format cannot express the model: nothing is written then; and
    RunFailed where it could not be written: what there was of it is removed.
    """
    destination = destination.expanduser().absolute()
    pending = _pending(source.check(given), None if dtype is None else np.dtype(dtype))
    tensors.check_dtypes({tensor.dtype for tensor in pending.values()})
    files, keys = _files(given, pending), {names.theirs(key): key for key in given.arrays}
    try:
        _write(destination, pending, files, shard_bytes, lambda name: done(keys[name]))
    except OSError as error:
        raise RunFailed(f"{str(destination)!r} could not be written: {error.strerror or error}") from error


def _write(destination: pathlib.Path, pending, files: Mapping[str, bytes], limit: int, done) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    with staging.staged(destination) as folder:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        _write_tensors(folder, pending, limit, done)
        _compare(folder, pending)


def _pending(given: Source, dtype: np.dtype | None) -> dict[str, Pending]:
    dims, pending = source.dims(given.model), {}
    for key in source.expected_shapes(given.model):
        stored, letters = given.arrays[key], dims[key.name]
        values = functools.partial(_values, stored, letters)
        shape = linear.shape(letters, stored.shape)
        pending[names.theirs(key)] = Pending(shape, dtype or np.dtype(stored.dtype), values)
    return pending


def _values(stored: source.Stored, dims: str) -> np.ndarray:
    return linear.from_ours(stored.read(), dims=dims)


def _files(given: Source, pending: Mapping[str, Pending]) -> dict[str, bytes]:
    """All but the weights, by name."""
    dtypes = {tensor.dtype for tensor in pending.values()}
    config = config_out.describe(
        given.model,
        dtype=functools.reduce(jnp.promote_types, dtypes),
        context=given.context or DEFAULT_CONTEXT,
        generation=dict(given.generation),
    )
    files = {**given.files, read.CONFIG: config_out.to_json(config)}
    if given.generation:
        files[read.GENERATION] = config_out.to_json(dict(given.generation))
    if config_out.needs_program(config):
        files[config_out.MODELING] = (pathlib.Path(__file__).parent / config_out.MODELING).read_bytes()
        if tokenizer_files.MAIN in files:
            files[tokenizer_files.CONFIG] = _with_class(given.path, files.get(tokenizer_files.CONFIG, b"{}"))
    return files


def _with_class(where: str, content: bytes) -> bytes:
    """tokenizer_config.json, naming its class: of a model_type of ours AutoTokenizer knows none."""
    try:
        told = json.loads(content)
    except ValueError as error:
        raise UserError(f"{where!r}: {tokenizer_files.CONFIG} is not JSON: {error}") from None
    return config_out.to_json({"tokenizer_class": tokenizer_files.FAST, **told})


def _write_tensors(folder: pathlib.Path, pending, limit: int, done) -> None:
    parts = list(tensors.shards(pending, limit=limit))
    placed = {}
    for index, part in enumerate(parts, start=1):
        file = read.WEIGHTS if len(parts) == 1 else f"model-{index:05}-of-{len(parts):05}.safetensors"
        for name in tensors.write(folder / file, part):
            placed[name] = file
            done(name)
    if len(parts) > 1:
        total = {"total_size": sum(tensor.nbytes for tensor in pending.values())}
        (folder / read.INDEX).write_bytes(config_out.to_json({"metadata": total, "weight_map": placed}))


def _compare(folder: pathlib.Path, pending: Mapping[str, Pending]) -> None:
    """Raises RunFailed where a file does not hold what was to be written."""
    found = read.stored(folder)
    for name, tensor in pending.items():
        if not tensors.same(found[name].read(), tensor.values().astype(tensor.dtype, copy=False)):
            raise RunFailed(f"{str(found[name].file)!r} does not hold the {name} that was written to it")
