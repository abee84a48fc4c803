"""Read a Hugging Face folder as a Source: config.json, safetensors, a tokenizer."""

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ladder_jax.config import ModelConfig
from ladder_jax.errors import UserError
from ladder_jax.pretrained import linear, source, tokenizer_files
from ladder_jax.pretrained.huggingface import config_in, experts, names, tensors
from ladder_jax.pretrained.huggingface.tensors import Tensor
from ladder_jax.pretrained.source import Key, Source, Stored

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The generation settings in config.json, for folders without generation_config.json."""
_PICKLES = ("*.bin", "*.pt", "*.pth")


def read(folder: pathlib.Path) -> Source:
    """The model in `folder`. Reads and compares its configuration and its files' headers, but no values.

    Raises UserError for a model that we cannot represent, and for files that are missing, damaged, or of another model.
    """
    config = read_object(folder / CONFIG)
    model = config_in.model(config, where=str(folder / CONFIG))
    generation = read_object(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    tokens = {name: config[name] for name in TOKENS if config.get(name) is not None}
    return source.check(
        Source(
            path=str(folder),
            model=model,
            arrays=_arrays(folder, model),
            context=config_in.context(config, where=str(folder / CONFIG)),
            files=tokenizer_files.read(folder),
            generation={**tokens, **generation},
            refit=source.refit_in(folder),
        )
    )


def read_object(file: pathlib.Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises UserError if it is missing or holds something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{str(file.parent)!r} holds no {file.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{str(file)!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{str(file)!r} must hold a JSON object")
    return value


def _arrays(folder: pathlib.Path, model: ModelConfig) -> Mapping[Key, Stored]:
    remaining = stored(folder)
    source.check_layers(model, tensors=len(remaining), path=str(folder))
    dims, arrays = source.dims(model), {}
    _drop_tied_head(remaining, model)
    if model.moe is not None:
        arrays |= experts.take(remaining, model, folder=folder)
    for key, ours in source.expected_shapes(model).items():
        if key in arrays:
            continue
        name, letters = names.theirs(key, model=model), dims[key.name]
        if name not in remaining:
            raise UserError(f"{str(folder)!r} holds no {name}")
        tensor, shape = remaining.pop(name), linear.shape(letters, ours)
        if tensor.shape != shape:
            raise UserError(f"{str(tensor.file)!r}: {name} is {tensor.shape}, but {shape} by its {CONFIG}")
        arrays[key] = Stored(ours, tensor.dtype, functools.partial(_read, tensor, letters, ours))
    if extra := sorted(name for name in remaining if not names.is_derived(name)):
        more = f" and {len(extra) - 1} more" if extra[1:] else ""
        raise UserError(f"{str(folder)!r} holds {extra[0]}{more}, not in the model of its {CONFIG}")
    return arrays


def _read(tensor: Tensor, dims: str, shape: tuple[int, ...]) -> np.ndarray:
    return linear.to_ours(tensor.read(), dims=dims, ours=shape)


def stored(folder: pathlib.Path) -> dict[str, Tensor]:
    """All tensors by Hugging Face's names, from the files in the index, or from the single file."""
    if not (folder / INDEX).is_file():
        if not (folder / WEIGHTS).is_file():
            raise UserError(_no_weights(folder))
        return tensors.tensors(folder / WEIGHTS)
    listed = read_object(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise UserError(f"{str(folder / INDEX)!r} has no weight_map")
    all_tensors = {}
    for name in sorted(set(listed.values())):
        if pathlib.PurePath(name).name != name:
            raise UserError(f"{str(folder / INDEX)!r} names a file outside its folder: {name!r}")
        shard = tensors.tensors(folder / name)
        expected = {tensor for tensor, file in listed.items() if file == name}
        for tensor in sorted(expected ^ shard.keys()):
            verb = "lacks" if tensor in expected else "holds"
            raise UserError(f"{str(folder / name)!r} {verb} {tensor}, which contradicts {INDEX}")
        all_tensors |= shard
    return all_tensors


def _no_weights(folder: pathlib.Path) -> str:
    if any(file for pattern in _PICKLES for file in folder.glob(pattern)):
        return (
            f"{str(folder)!r} holds weights only as pickles, which can run any program when they are opened"
            " (transformers' save_pretrained writes safetensors)"
        )
    return f"{str(folder)!r} holds no {WEIGHTS} and no {INDEX}"


def _drop_tied_head(remaining: dict[str, Tensor], model: ModelConfig) -> None:
    """Remove the head of a model with tied embeddings: some files contain the table twice."""
    head, table = names.TABLE["head/table"], remaining.get(names.TABLE["embedding/table"])
    if not model.tie_embeddings or head not in remaining or table is None:
        return
    tensor = remaining.pop(head)
    if not tensors.same(tensor.read(), table.read()):
        raise UserError(f"{str(tensor.file)!r}: {head} differs from the embedding, though tie_word_embeddings is true")
