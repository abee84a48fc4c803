"""A ladder_jax checkpoint as a Source, and a Source as a checkpoint, for `generate`, `serve`,
`evaluate` and `train`.

What is written looks like a run's folder: `checkpoints/0/`, without an optimizer's state, and
`tokenizer/`.
"""

import functools
import pathlib
from collections.abc import Iterator

import jax
import numpy as np

from ladder_jax.checkpoint import saved
from ladder_jax.checkpoint.arrays import opened, write_pieces
from ladder_jax.config import DataConfig, FolderConfig, RunConfig
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.errors import RunFailed
from ladder_jax.files import reason
from ladder_jax.pretrained import source
from ladder_jax.pretrained.huggingface import folder as huggingface
from ladder_jax.pretrained.source import Key, Source
from ladder_jax.terminal import progress

STEP = 0


def read(path: pathlib.Path) -> Source:
    """The checkpoint at `path` (a run's folder, its `checkpoints/`, or one step's), compared with
    its manifest.

    Raises UserError if there is no checkpoint, and Damaged.
    """
    checkpoint = saved.open_checkpoint(path)
    step = checkpoint.path
    if checkpoint.has_manifest:
        saved.check_files(step, "params/")
    model = checkpoint.config.model
    source.check_alone(model, path=str(path))
    store = functools.cache(lambda name: opened(step / "params", name).result())
    folder = step.parent.parent / tokenizers.FOLDER
    return Source(
        str(path),
        model,
        source.stored(model, store),
        checkpoint.config.train.sequence,
        huggingface.tokenizer_files(folder),
        huggingface.generation_in(folder),
        source.refit_in(folder.parent),
        checkpoint.config.decode,
        checkpoint.is_bytes,
    )


def write(exported: Source, folder: pathlib.Path, *, place: pathlib.Path) -> None:
    """Write `exported` into `folder`, one array at a time.

    place: the destination, to which `folder` will be renamed.
    Raises UserError for a tokenizer that does not fit, RunFailed if writing fails.
    """
    folder.mkdir()
    if exported.tokenizer is not None:
        tokenizers.save(exported.tokenizer, folder / tokenizers.FOLDER)
    item = folder / "checkpoints" / str(STEP)
    stacked = {}
    for key, array in exported.arrays.items():
        shape = array.shape
        if key.layer is not None:
            shape = (len(key.layers(exported.model)), *shape)
        stacked[key.name] = jax.ShapeDtypeStruct(shape, exported.dtypes[key.name])
    # so that the layers of a stack are written one after another
    in_order = sorted(exported.arrays, key=lambda key: (key.name, key.layer or 0))

    def pieces() -> Iterator[tuple[Key, np.ndarray]]:
        with progress(len(in_order), label="written {done}/{total} arrays") as update:
            for done, key in enumerate(in_order, start=1):
                yield key, exported.arrays[key].read()
                update(done, "")

    try:
        write_pieces(item / "params", stacked, pieces())
        saved.publish(item, saved.texts(_config(exported, place=place), step=STEP))
    except ValueError as error:  # tensorstore's, of a disk too
        raise RunFailed(f"cannot write {str(place)!r}: {reason(error)}") from error


def _config(exported: Source, *, place: pathlib.Path) -> RunConfig:
    """A run's configuration with the model, its context, its tokenizer and how it generates. The
    other settings are defaults.
    """
    tokenizer = str(place / tokenizers.FOLDER)
    if isinstance(exported.tokenizer, tokenizers.Bytes):
        tokenizer = tokenizers.BYTES
    return RunConfig(
        model=exported.model,
        train=exported.train_config,
        decode=exported.decode,
        data=DataConfig(tokenizer=tokenizer),
        run=FolderConfig(name=place.name, dir=str(place)),
    )
