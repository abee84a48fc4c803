"""Write a Source as a ladder_jax checkpoint, one array at a time, for `generate`, `serve`, `evaluate` and `train`.

The folder looks like a run's: `checkpoints/0/`, without an optimizer's state, and `tokenizer/`.
"""

import json
import pathlib
import time

import jax
import jax.numpy as jnp

from ladder_jax import nn
from ladder_jax.checkpoint import manifest, saved
from ladder_jax.checkpoint.stream import Stream
from ladder_jax.config import DataConfig, FolderConfig, RunConfig, TrainConfig, to_dict
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.errors import RunFailed
from ladder_jax.pretrained import tokenizer_files
from ladder_jax.pretrained.source import Key, Source
from ladder_jax.progress import progress

STEP = 0


def shapes(source: Source) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each stored array, with layers stacked. If dtypes differ between layers, the widest."""
    stacked: dict[str, jax.ShapeDtypeStruct] = {}
    for key, array in source.arrays.items():
        shape = array.shape if key.layer is None else (len(key.layers(source.model)), *array.shape)
        earlier = stacked.get(key.name)
        dtype = array.dtype if earlier is None else jnp.promote_types(earlier.dtype, array.dtype)
        stacked[key.name] = jax.ShapeDtypeStruct(shape, dtype)
    return stacked


def size(source: Source) -> int:
    """The approximate number of bytes that `write` writes. Compression is ignored, as it saves little."""
    return sum(array.size * array.dtype.itemsize for array in shapes(source).values())


def write(source: Source, folder: pathlib.Path, *, definition: nn.ModelDef, place: pathlib.Path) -> None:
    """Write `source` into `folder`, read it back and compare.

    definition: the model to store, which may have other ladder layers than `source`.
    place: the destination, to which `folder` will be renamed.
    Raises UserError for a tokenizer that does not fit, RunFailed if writing fails or other values are read back.
    """
    folder.mkdir()
    write_tokenizer(source, folder / tokenizers.FOLDER)
    checkpoint = folder / "checkpoints" / str(STEP)
    try:
        with Stream(checkpoint / "params", shapes(source)) as stream:
            with progress(len(source.arrays), label="written {done}/{total} arrays") as update:
                for done, (key, array) in enumerate(_in_order(source), start=1):
                    stream.put(key.name, array.read(), layer=key.layer)
                    update(done, "")
            stream.finish()
            _compare(stream, place=place)
        _describe(checkpoint, config=_config(source, definition, place=place))
        manifest.write(checkpoint)
        saved.check_shapes(saved.stored(checkpoint / "params"), definition.abstract, folder=checkpoint)
        if problems := saved.verify(checkpoint):
            raise RunFailed(f"cannot write {str(place)!r}: {problems[0]}")
    except (OSError, ValueError) as error:  # tensorstore raises ValueErrors
        raise RunFailed(f"cannot write {str(place)!r}: {saved.reason(error)}") from error


def write_tokenizer(source: Source, folder: pathlib.Path) -> None:
    """Write the source's tokenizer, chat template and generation settings; nothing if it has no tokenizer.

    Raises UserError if the tokenizer has more tokens than the model.
    """
    about = dict(generation=source.generation, vocab_size=source.model.vocab_size, path=source.path)
    tokenizer_files.write(source.files, folder, **about)


def _in_order(source: Source):
    """The arrays sorted by name and layer, so that the layers of a stack are written one after another."""
    return sorted(source.arrays.items(), key=lambda item: (item[0].name, _layer_number(item[0])))


def _layer_number(key: Key) -> int:
    return -1 if key.layer is None else key.layer


def _compare(stream: Stream, *, place: pathlib.Path) -> None:
    with progress(stream.count, label="compared {done}/{total} pieces") as update:
        for done, name in enumerate(stream.differences(), start=1):
            if name is not None:
                raise RunFailed(f"cannot write {str(place)!r}: {name} reads back with other values than were written")
            update(done, "")


def _config(source: Source, definition: nn.ModelDef, *, place: pathlib.Path) -> RunConfig:
    """A run's configuration with the model, its context and its tokenizer. The other settings are defaults."""
    has_tokenizer = tokenizers.huggingface.MAIN in source.files
    is_bytes = not has_tokenizer and source.model.vocab_size == tokenizers.Bytes().vocab_size
    data = DataConfig(tokenizer=tokenizers.BYTES if is_bytes else str(place / tokenizers.FOLDER))
    train = TrainConfig() if source.context is None else TrainConfig(sequence=source.context)
    return RunConfig(model=definition.config, train=train, data=data, run=FolderConfig(name=place.name, dir=str(place)))


def _describe(checkpoint: pathlib.Path, *, config: RunConfig) -> None:
    """Write the items `meta` and `data`, as a run's Store does."""
    meta = {"format": saved.FORMAT, "version": saved.VERSION, "manifest": manifest.NAME, "step": STEP}
    meta |= {"time": time.time(), "validation_loss": None, "config": to_dict(config)}
    for name, content in (("meta", meta), ("data", {"step": STEP})):
        (checkpoint / name).mkdir()
        (checkpoint / name / "metadata").write_text(json.dumps(content), encoding="utf-8")
