"""What `data.path` names, as rows to train on: text, a token store, or a mixture of stores."""

import dataclasses
import hashlib
import json
import pathlib

import grain
import numpy as np

from ladder_jax.config import DataConfig, Format, TrainConfig
from ladder_jax.data import batches, examples, mixture, text
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.store import Store, is_store
from ladder_jax.data.tokenizer import BYTES, Tokenizer
from ladder_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Dataset:
    """training, held_out: rows without end, each T + 1 tokens, or a row's Batch where documents are packed.

    held_out_rows: how many of those there are before they repeat.
    fingerprint: of all tokens and their order. With the seed and the step it is the whole state of an iteration.
    text: the training text, uint8, where it is bytes and not a store.
    notes: what a user should know of it.
    """

    training: grain.MapDataset
    held_out: grain.MapDataset
    held_out_rows: int
    tokenizer: Tokenizer
    fingerprint: str
    text: np.ndarray | None = None
    notes: tuple[str, ...] = ()


def load(config: DataConfig, *, train: TrainConfig, vocab_size: int, tokenizer: Tokenizer | None = None) -> Dataset:
    """Raises UserError for what is not there, cannot be read, is too little, or has more tokens than `vocab_size`.

    tokenizer: of the checkpoint that training starts from, which the data must have been made with.
    """
    path, started = pathlib.Path(config.path).expanduser(), tokenizer
    if started is None or config.tokenizer != BYTES:
        tokenizer = tokenizers.load(config.tokenizer)
        _check_same(f"data.tokenizer={config.tokenizer!r}", tokenizer, started)
    if config.format is Format.EXAMPLES:
        return _examples(config, train, vocab_size, tokenizer)
    if path.suffix in mixture.ENDINGS and path.is_file():
        found = _mixed(mixture.read(path), config, train, vocab_size)
    elif path.is_dir() and is_store(path):
        found = _stored(Store(path), config, train, vocab_size)
    else:
        found = _text(config, train, vocab_size, tokenizer)
    _check_same(f"the tokens of data.path={config.path!r}", found.tokenizer, started)
    return found


def _check_same(what: str, tokenizer: Tokenizer, wanted: Tokenizer | None) -> None:
    if wanted is not None and tokenizer.name != wanted.name:
        raise UserError(f"{what}: {tokenizer.name}, but the checkpoint that training starts from has {wanted.name}")


def _examples(config: DataConfig, train: TrainConfig, vocab_size: int, tokenizer: Tokenizer) -> Dataset:
    """Packed examples, of which the last are held out."""
    tokenizers.check_vocabulary(tokenizer, vocab_size=vocab_size)
    found = examples.load(config.path, tokenizer=tokenizer, length=train.sequence)
    cut = int(np.clip(len(found) - int(len(found) * config.validation_fraction), 1, len(found) - 1))
    rows = examples.ExampleRows(found, first=0, end=cut, length=train.sequence)
    held_out = examples.ExampleRows(found, first=cut, end=len(found), length=train.sequence)
    return Dataset(
        batches.shuffled(rows, seed=train.seed),
        batches.repeated(held_out),
        len(held_out),
        tokenizer,
        _digest([tokenizer.name, found.fingerprint]),
        notes=(found.described(),),
    )


def _text(config: DataConfig, train: TrainConfig, vocab_size: int, tokenizer: Tokenizer) -> Dataset:
    """Windows of one long text, cut where they happen to end."""
    tokenizers.check_vocabulary(tokenizer, vocab_size=vocab_size)
    tokens = text.tokens(text.load(config), tokenizer=tokenizer)
    content, rest = batches.split(tokens, config=config)
    rows = batches.windows(content, train.sequence, "training")
    held_out = batches.windows(rest, train.sequence, "held-out")
    digest = hashlib.sha256(tokens).hexdigest()
    return Dataset(
        batches.shuffled(rows, seed=train.seed),
        batches.repeated(held_out),
        len(held_out),
        tokenizer,
        _digest([tokenizer.name, digest]),
        content if tokenizer.name == BYTES else None,
    )


def _stored(
    store: Store, config: DataConfig, train: TrainConfig, vocab_size: int, *, seed: int | None = None
) -> Dataset:
    """Packed documents, of which the last are held out."""
    tokenizer = store.tokenizer()
    tokenizers.check_vocabulary(tokenizer, vocab_size=vocab_size)
    if config.tokenizer != BYTES and tokenizers.load(config.tokenizer).name != tokenizer.name:
        raise UserError(
            f"the token store {str(store.folder)!r} is of {tokenizer.name}, not of data.tokenizer={config.tokenizer!r}"
        )
    documents, total = store.manifest.documents, store.manifest.tokens
    if documents < 2:
        raise UserError(f"the token store {str(store.folder)!r} has one document; one to hold out is needed, too")
    cut = np.searchsorted(store.starts, total - int(total * config.validation_fraction))
    cut = int(np.clip(cut, 1, documents - 1))
    rows = batches.PackedRows(store, first=0, end=cut, length=train.sequence)
    held_out = batches.PackedRows(store, first=cut, end=documents, length=train.sequence)
    return Dataset(
        batches.shuffled(rows, seed=train.seed if seed is None else seed),
        batches.repeated(held_out),
        len(held_out),
        tokenizer,
        store.manifest.fingerprint,
    )


def _mixed(parts: list[mixture.Part], config: DataConfig, train: TrainConfig, vocab_size: int) -> Dataset:
    """Rows of several stores in turns, by weight; each store has epochs of its own."""
    stores = [Store(part.path) for part in parts]
    # A seed for each: stores of one size would otherwise be shuffled alike.
    seeds = [(train.seed + index * 0x9E3779B9) % 2**32 for index in range(len(stores))]
    found = [_stored(store, config, train, vocab_size, seed=seed) for store, seed in zip(stores, seeds)]
    for store, one in zip(stores, found):
        if one.tokenizer.name != found[0].tokenizer.name:
            raise UserError(
                f"a mixture has one tokenizer: {str(stores[0].folder)!r} is of {found[0].tokenizer.name},"
                f" {str(store.folder)!r} of {one.tokenizer.name}"
            )
    weights = [part.weight for part in parts]
    mix = lambda rows: grain.MapDataset.mix(rows, weights)
    return Dataset(
        mix([one.training for one in found]),
        mix([one.held_out for one in found]),
        sum(one.held_out_rows for one in found),
        found[0].tokenizer,
        _digest([[one.fingerprint, weight] for one, weight in zip(found, weights)]),
    )


def _digest(content: list) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
