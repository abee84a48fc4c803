"""A Hugging Face folder (config.json, safetensors, a tokenizer) as a Source, and a Source as such a
folder.
"""

import functools
import json
import os
import pathlib
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from ladder_jax.config import Json, ModelConfig
from ladder_jax.data.tokenizer import CARRIED, FILES, GENERATION, MAIN, json_object
from ladder_jax.errors import UserError, needed
from ladder_jax.files import leads_out
from ladder_jax.pretrained import source, tensors
from ladder_jax.pretrained.fields import Fields
from ladder_jax.pretrained.huggingface import config, weights
from ladder_jax.pretrained.source import Arrays, Source, Stored
from ladder_jax.terminal import progress

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 * 10**9
"""A larger model is written as several files and an index. The host holds one file's tensors."""
DEFAULT_CONTEXT = 2048  # tokens, if the source has no context
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = tuple(name for name in (*FILES, *CARRIED) if name != GENERATION)
"""What a Source carries into an export: no program and no foreign file.

Exported Ladder models are opened with trust_remote_code=True. That would also run a program that
the original tokenizer names (`auto_map`). And copying a link would publish the file that it points
to.
"""
_CLASS = "tokenizer_class"
_FAST = "PreTrainedTokenizerFast"
"""Transformers' class that needs only tokenizer.json, for any model family."""


def read(folder: pathlib.Path) -> Source:
    """The model in `folder`. Reads and compares its configuration and its files' headers; of values
    only two tables of a tied model, which must be one.

    Raises UserError for a model that we cannot represent, and for files that are missing, damaged,
    or of another model.
    """
    file = folder / CONFIG
    told = read_object(file)
    where = str(file)
    model = config.read(told, where=where)
    tokens = {name: told[name] for name in config.TOKENS if told.get(name) is not None}
    return Source(
        path=str(folder),
        model=model,
        arrays=_arrays(folder, model),
        context=Fields(told, where)("max_position_embeddings", int, None),
        files=tokenizer_files(folder),
        generation={**tokens, **generation_in(folder)},
        refit=source.refit_in(folder),
    )


def _arrays(folder: pathlib.Path, model: ModelConfig) -> Arrays:
    """Old files contain rotary frequencies, some the table of tied embeddings twice, which is
    compared: transformers 5 would not tie two that differ. Raises UserError as `tensors.arrays`
    does, too.
    """
    found = {
        name: one
        for name, one in stored(folder).items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    if model.tie_embeddings and (head := found.pop(weights.HEAD, None)):
        table = found.get(weights.TABLE)
        if table and not np.array_equal(head.read(), table.read()):
            raise UserError(
                f"{str(folder)!r} holds a {weights.HEAD} that differs from {weights.TABLE}, but {CONFIG} sets"
                " tie_word_embeddings=true: set it to false"
            )
    mixtral = any(".block_sparse_moe." in name for name in found)
    names = weights.MIXTRAL if mixtral else weights.NAMES
    return tensors.arrays(str(folder), model, found, names)


def generation_in(folder: pathlib.Path) -> Json:
    """The settings in generation_config.json, if it is there."""
    if _has_file(folder, GENERATION):
        return read_object(folder / GENERATION)
    return {}


def tokenizer_files(folder: pathlib.Path) -> dict[str, bytes]:
    """The contents of those `TOKENIZER_FILES` that are in `folder`, by name. Raises UserError for
    links that lead out of it.
    """
    found = filter(functools.partial(_has_file, folder), TOKENIZER_FILES)
    files = {name: source.content(folder / name) for name in found}
    return without_program(files, where=str(folder))


def without_program(files: Mapping[str, bytes], *, where: str) -> dict[str, bytes]:
    """Those `TOKENIZER_FILES` among a tokenizer's files, which name no program. `where` is their
    folder, for messages.
    """
    found = {name: files[name] for name in TOKENIZER_FILES if name in files}
    if TOKENIZER_CONFIG in found:
        told = json_object(found[TOKENIZER_CONFIG], where=os.path.join(where, TOKENIZER_CONFIG))
        if "auto_map" in told:  # names the class's program, which is not exported
            del told["auto_map"]
            told.pop(_CLASS, None)
            if MAIN in found:
                told[_CLASS] = _FAST
            found[TOKENIZER_CONFIG] = _to_json(told)
    return found


def _has_file(folder: pathlib.Path, name: str) -> bool:
    """Whether `folder` contains the file `name`. Raises UserError for a link that leads out of the
    folder.
    """
    check_inside(folder / name)
    return (folder / name).is_file()


def check_inside(file: pathlib.Path) -> None:
    """Raises UserError for a link that leads out of its folder."""
    if leads_out(file):
        raise UserError(
            f"{str(file)!r} leads out of its folder, and an export copies no such file: put a copy there"
        )


def read_object(file: pathlib.Path) -> Json:
    """The JSON object in `file`. Raises UserError if it is missing or holds something else."""
    return json_object(source.content(file), where=file)


def stored(folder: pathlib.Path) -> dict[str, Stored]:
    """All tensors by Hugging Face's names, from the single file, or from those in the index.

    As in transformers, which leaves an index there when it writes a single file in place of several.
    """
    single = folder / WEIGHTS
    if single.is_file():
        return weights.tensors_in(single)
    index = folder / INDEX
    if not index.is_file():
        raise UserError(
            f"{str(folder)!r} holds no {WEIGHTS} and no {INDEX} (pickles, which can run any program when they are"
            " opened, are not read: transformers' save_pretrained writes safetensors)"
        )
    listed = read_object(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise UserError(f"{str(index)!r} has no weight_map")
    all_tensors = {}
    for name in sorted(set(listed.values())):
        if pathlib.PurePath(name).name != name:
            raise UserError(f"{str(index)!r} names a file outside its folder: {name!r}")
        found = weights.tensors_in(folder / name)
        if twice := all_tensors.keys() & found.keys():
            raise UserError(f"{str(folder)!r} holds {min(twice)} twice: {name!r} has it, too")
        all_tensors |= found
    return all_tensors


def write(exported: Source, folder: pathlib.Path) -> None:
    """Write config.json, safetensors, tokenizer and generation config to the new `folder`.

    Values keep their dtypes; the host holds one file's arrays at a time. Raises UserError if the
    format cannot express the model, RunFailed if writing fails.
    """
    described = config.describe(
        exported.model,
        dtype=functools.reduce(jnp.promote_types, exported.dtypes.values()),
        context=exported.context or DEFAULT_CONTEXT,
        generation=dict(exported.generation),
    )
    names = weights.MIXTRAL if described["model_type"] == "mixtral" else weights.NAMES
    pending = tensors.written(exported, names)
    folder.mkdir()
    for name, content in _files(exported, described).items():
        (folder / name).write_bytes(content)
    _write_tensors(folder, pending)


def _files(exported: Source, described: Json) -> dict[str, bytes]:
    """The contents of all files except the weights, by name."""
    files = {**exported.files, CONFIG: _to_json(described)}
    if exported.generation:
        files[GENERATION] = _to_json(dict(exported.generation))
    if described["model_type"] == config.LADDER:
        program = pathlib.Path(__file__).with_name(config.MODELING)
        files[config.MODELING] = program.read_bytes()
        if MAIN in files:  # AutoTokenizer has no default class for our model_type
            where = pathlib.Path(exported.path, TOKENIZER_CONFIG)
            told = json_object(files.get(TOKENIZER_CONFIG, b"{}"), where=where)
            files[TOKENIZER_CONFIG] = _to_json({_CLASS: _FAST, **told})
    return files


def _write_tensors(folder: pathlib.Path, pending: Mapping[str, Stored]) -> None:
    with needed("an export needs huggingface_hub", extra="hf"):
        from huggingface_hub import split_state_dict_into_shards_factory as split
    shards = split(
        pending,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    with progress(len(pending), label="written {done}/{total} tensors") as update:
        done = 0
        for file, names in shards.filename_to_tensors.items():
            weights.write_tensors(folder / file, {name: pending[name] for name in names})
            done += len(names)
            update(done, "")
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / INDEX).write_bytes(_to_json(index))


def _to_json(value: Json) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
