"""Training rows from `data.path`: text, examples, a token store, or a mixture of stores; and their
batches, on grain, with their way onto the devices.

A batch is a function of the seed and the step alone, so an iteration has no state to save.
"""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import pathlib
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from ladder_jax.config import DataConfig, Format, TrainConfig
from ladder_jax.config.load import read_yaml
from ladder_jax.data import examples, json_lines, tokenizer as tokenizers
from ladder_jax.data.examples import Examples
from ladder_jax.data.packing import Batch, PackedRows
from ladder_jax.data.store import Store, is_store
from ladder_jax.data.tokenizer import BYTES, Tokenizer
from ladder_jax.errors import UserError
from ladder_jax.files import (
    AnyPath,
    absolute,
    below,
    digest,
    expanded,
    explained,
    is_remote,
    local_path,
    patiently,
    text_of,
)

STDLIB = "stdlib"  # a data.path
MIXTURES = (".yaml", ".yml")  # endings of files that list token stores, mixed by weight
LEAST_WEIGHT = 1e-12  # in a mixture; the largest is its inverse
READ_AHEAD = 2  # batches


Rows = np.ndarray | PackedRows
"""A grain data source, of T + 1 tokens each."""


def windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """A view [rows, T + 1]: window i is tokens [i * T, i * T + T] (the last is only a target)."""
    every = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)
    return every[::length]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """training, held_out: endless rows, each T + 1 tokens, or one row's Batch if documents are
    packed.

    training_rows, held_out_rows: their numbers before they repeat.
    fingerprint: a digest of all tokens and their order. Together with the seed and the step, it
        determines every batch.
    notes: lines to show to the user.
    text: the training text as bytes, uint8; None for other tokenizers and formats.
    """

    training: grain.MapDataset
    held_out: grain.MapDataset
    training_rows: int
    held_out_rows: int
    tokenizer: Tokenizer
    fingerprint: str
    notes: tuple[str, ...]
    text: np.ndarray | None = None


def load(
    config: DataConfig,
    *,
    train: TrainConfig,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    began: float | None = None,
) -> Dataset:
    """Load the data of a configuration.

    tokenizer: the tokenizer of the checkpoint that training starts from; the data must have the
    same. began: when the run did, in seconds since 1970: what a chat template that asks for the
    time is told, in UTC; None: the present. Raises UserError if the data is missing, unreadable or
    too short, or has more different tokens than `vocab_size`.
    """
    required = tokenizer
    tokenizer = tokenizer or tokenizers.load(None)
    if config.tokenizer != BYTES:
        tokenizer = tokenizers.load(config.tokenizer)
        # before all is tokenized
        _check(f"data.tokenizer={config.tokenizer!r}", tokenizer, required, vocab_size)
    path = expanded(config.path)
    named = f"data.path={config.path!r}"
    with explained(path, "read"):
        listed = path.suffix in MIXTURES and path.is_file()
        stored = patiently(path, lambda: path.is_dir() and is_store(path))
    if config.format is Format.EXAMPLES:
        if listed:
            raise UserError(
                f"{named} must be JSON lines, or a folder of them; to train on several in order,"
                " start each run from the one before (train.start=RUN)"
            )
        dataset = _examples(config, train, tokenizer, began)
    elif listed:
        dataset = _mixed(read_mixture(path), config, train, tokenizer)
    elif stored:
        dataset = _stored(path, config, train, tokenizer)
    elif is_remote(path):
        raise UserError(f"{named}: there is no token store; text is read from local files only")
    else:
        dataset = _text(config, train, tokenizer)
    _check(f"the tokens of {named}", dataset.tokenizer, required, vocab_size)
    return dataset


def _check(what: str, tokenizer: Tokenizer, required: Tokenizer | None, vocab_size: int) -> None:
    tokenizers.check_vocabulary(tokenizer, vocab_size=vocab_size)
    if required is not None and tokenizer.name != required.name:
        raise UserError(
            f"{what}: {tokenizer.name}, but the checkpoint that training starts from has {required.name}"
        )


def _text(config: DataConfig, train: TrainConfig, tokenizer: Tokenizer) -> Dataset:
    """Windows of one long text, cut regardless of its contents. The end is held out."""
    tokens, note = read_text(config)
    is_bytes = tokenizer.name == BYTES
    if not is_bytes:
        # `data.max_bytes` may have cut the last character.
        text = tokens.tobytes().decode("utf-8", errors="ignore")
        tokens = np.array(tokenizer.encode(text), np.int32)
    cut = _before_held_out(len(tokens), config)
    parts = {"training": tokens[:cut], "held-out": tokens[cut:]}
    for name, part in parts.items():
        if len(part) <= train.sequence:
            least = f"fewer than train.sequence + 1 = {train.sequence + 1}"
            raise UserError(f"the {name} text has {len(part)} tokens, {least}")
    of_tokens = hashlib.sha256(tokens).hexdigest()
    return _dataset(
        [windows(part, train.sequence) for part in parts.values()],
        train,
        tokenizer=tokenizer,
        fingerprint=digest(tokenizer.name, of_tokens),
        notes=(note,),
        text=parts["training"] if is_bytes else None,
    )


def _examples(
    config: DataConfig, train: TrainConfig, tokenizer: Tokenizer, began: float | None
) -> Dataset:
    """Packed examples. The last ones are held out."""
    now = None
    if began is not None:
        now = datetime.datetime.fromtimestamp(began, datetime.UTC)
    loaded = examples.load(config.path, tokenizer=tokenizer, length=train.sequence, now=now)
    cut = _before_held_out(len(loaded), config)
    return _dataset(
        _packed(loaded, cut, train, loaded.loss_mask),
        train,
        tokenizer=tokenizer,
        fingerprint=digest(tokenizer.name, loaded.fingerprint),
        notes=(loaded.summary,),
    )


def _stored(path: AnyPath, config: DataConfig, train: TrainConfig, given: Tokenizer) -> Dataset:
    """Packed documents. The last ones are held out."""
    store = Store(path)
    manifest = store.manifest
    tokenizer = store.tokenizer()
    what = f"the token store {str(store.folder)!r}"
    if config.tokenizer != BYTES and given.name != tokenizer.name:
        raise UserError(
            f"{what} is of {tokenizer.name}, not of data.tokenizer={config.tokenizer!r}"
        )
    if manifest.documents < 2:
        raise UserError(f"{what} has one document; it needs two, as one is held out")
    cut = np.searchsorted(store.starts, _before_held_out(manifest.tokens, config))
    note = f"data: {manifest.documents:,} documents of {store.folder}, {manifest.tokens:,} tokens"
    return _dataset(
        _packed(store, cut, train),
        train,
        tokenizer=tokenizer,
        fingerprint=manifest.fingerprint,
        notes=(note,),
    )


def read_mixture(file: pathlib.Path) -> dict[AnyPath, float]:
    """The stores in a mixture file, and their weights, above 0. Raises UserError if it is not one.

    mixture:
      web: 7      # a store's folder, relative to this file, or gs://bucket/folder
      code: 3     # 3 of 10 rows, regardless of the stores' sizes, to within 1 %
    """
    tree = read_yaml(file, what="the mixture")
    weights = tree.get("mixture") if isinstance(tree, dict) and len(tree) == 1 else None
    if not isinstance(weights, dict) or not weights:
        raise UserError(
            f"{str(file)!r} must hold one section 'mixture:' with token stores and weights, such as 'web: 7'"
        )
    stores = {}
    for name, weight in weights.items():
        store = str(name)
        try:
            number = float(weight)  # YAML 1.1 reads 1e-3 as text
        except (TypeError, ValueError, OverflowError):
            number = 0
        if isinstance(weight, bool) or not LEAST_WEIGHT <= number <= 1 / LEAST_WEIGHT:
            raise UserError(
                f"{str(file)!r}: the weight of {store!r} must be a number above 0, from {LEAST_WEIGHT:g} to"
                f" {1 / LEAST_WEIGHT:g}, not {weight!r:.60}"
            )
        folder = absolute(store) if is_remote(store) else file.parent / local_path(store)
        if folder in stores:
            raise UserError(f"{str(file)!r} names {store!r} twice")
        stores[folder] = number
    return stores


def _mixed(
    stores: dict[AnyPath, float], config: DataConfig, train: TrainConfig, given: Tokenizer
) -> Dataset:
    """Rows of several stores, interleaved by weight. Each store has its own epochs."""
    paths = list(stores)
    parts = []
    for index, path in enumerate(paths):
        # A different seed for each: stores of the same size would otherwise be shuffled in the
        # same order.
        seed = (train.seed + index * 0x9E3779B9) % 2**32
        part = _stored(path, config, dataclasses.replace(train, seed=seed), given)
        parts.append(part)
        first = parts[0].tokenizer.name
        if part.tokenizer.name != first:
            raise UserError(
                f"a mixture has one tokenizer: {str(paths[0])!r} is of {first},"
                f" {str(path)!r} of {part.tokenizer.name}"
            )
    weights = list(stores.values())
    mix = lambda rows: grain.MapDataset.mix(rows, weights)
    identity = zip((part.fingerprint for part in parts), weights)
    return dataclasses.replace(
        parts[0],
        training=mix([part.training for part in parts]),
        held_out=mix([part.held_out for part in parts]),
        training_rows=sum(part.training_rows for part in parts),
        # they repeat by weight, so that they always fill a batch
        held_out_rows=max(train.batch, sum(part.held_out_rows for part in parts)),
        fingerprint=digest(*identity),
        notes=sum((part.notes for part in parts), ()),
    )


def _before_held_out(count: int, config: DataConfig) -> int:
    return count - int(count * config.validation_fraction)


def _packed(
    source: Examples | Store, cut: int, train: TrainConfig, loss_mask: np.ndarray | None = None
) -> list[PackedRows]:
    """Rows of the documents before `cut`, and of the others; one document at least of each. Raises
    UserError where no token of these is predicted.
    """
    starts = source.starts
    cut = int(np.clip(cut, 1, len(starts) - 2))
    parts = starts[: cut + 1], starts[cut:]
    for name, part in zip(("training", "held-out"), parts):
        if np.diff(part).max() < 2:
            raise UserError(
                f"the {name} documents of data.path have one token each, so none has one to predict"
                " (data.validation_fraction holds out the last ones)"
            )
    return [
        PackedRows(source.read, part, length=train.sequence, loss_mask=loss_mask) for part in parts
    ]


def _dataset(parts: Sequence[Rows], train: TrainConfig, **about: Any) -> Dataset:
    """parts: the rows to train on, and those that are held out."""
    rows, held_out = parts
    return Dataset(
        shuffled(rows, seed=train.seed),
        grain.MapDataset.source(held_out).repeat(),
        len(rows),
        len(held_out),
        **about,
    )


def read_text(config: DataConfig) -> tuple[np.ndarray, str]:
    """The text's bytes, uint8 [n], at most `data.max_bytes`, and a line about them for the user.

    For a folder: of all files that are UTF-8 text, in the order of their paths. Raises UserError if
    there are none.
    """
    path = config.path
    if path == STDLIB:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        without = {"site-packages", "test"}
        files = [p for p in sorted(root.rglob("*.py")) if without.isdisjoint(p.parts)]
    else:
        root = local_path(path)
        if not root.exists():
            raise UserError(
                f"data.path={path!r} does not exist (a text file, a folder, or {STDLIB!r})"
            )
        files = below(root, data=True)
    parts = []
    is_json = False
    size = 0
    for file in files:
        if size >= config.max_bytes:
            break
        # 4 bytes more, as the cut may lie within a character, and 3 for a byte order mark
        part = text_of(file, named=file == root, most=config.max_bytes - size + 7)
        if part is not None:
            is_json |= file.name.lower().endswith(json_lines.ENDINGS)
            content = part.encode()
            parts.append(content)
            size += len(content)
    text = b"\n".join(part for part in parts if part)[: config.max_bytes]
    if not text.strip():
        raise UserError(f"data.path={path!r} holds no text")
    note = f"data: {len(parts):,} of {len(files):,} files of {path}, {len(text):,} bytes of text"
    if len(text) == config.max_bytes:
        note += ", as many as data.max_bytes"
    if is_json:
        note += "; JSON is learnt as it is written: `ladder-jax tokenize` reads its texts"
    return np.frombuffer(text, np.uint8), note


def bigram_entropy(text: np.ndarray) -> float:
    """The entropy of a byte given the previous byte, in nats per byte: the best loss of a bigram
    model.
    """
    from scipy.special import entr  # slow to import

    codes = text[:-1].astype(np.int64) * 256 + text[1:]
    pairs = np.bincount(codes, minlength=65536).reshape(256, 256) / len(codes)
    return float(entr(pairs).sum() - entr(pairs.sum(axis=1)).sum())


def stacked(rows: grain.MapDataset, indices: Iterable[int]) -> np.ndarray | Batch:
    """These rows, [B, ...], int32. Others are never read."""
    chosen = [rows[index] for index in indices]
    stack = lambda *leaves: np.stack(leaves, dtype=np.int32)
    return jax.tree.map(stack, *chosen)


@functools.lru_cache(maxsize=1024)
def _order(count: int, seed: int, epoch: int) -> grain.MapDataset:
    """The indices of one epoch's rows. Hashed: grain's own repetition adds the epoch, so that epoch
    1 of a seed is epoch 0 of the next.
    """
    if epoch:
        hashed = np.random.SeedSequence((seed, epoch)).generate_state(1)
        seed = int(hashed[0])
    return grain.MapDataset.range(count).shuffle(seed)


def shuffled(rows: Rows, *, seed: int) -> grain.MapDataset:
    """Every row once an epoch, every epoch in another order, without end."""
    count = len(rows)

    def row(index: int) -> np.ndarray | Batch:
        epoch, place = divmod(int(index), count)
        order = _order(count, seed, epoch)
        return rows[order[place]]

    return grain.MapDataset.range(sys.maxsize).map(row)


def evaluated(
    rows: grain.MapDataset, count: int, *, config: TrainConfig
) -> list[np.ndarray | Batch]:
    """The batches of held-out `rows`, of which there are `count` before they repeat, that are
    evaluated. Where they do not fill one, it is padded with rows that predict nothing.
    """
    batch = config.batch
    wanted = min(config.evaluation_batches, count // batch)
    firsts = range(0, batch * max(1, wanted), batch)
    batches = [stacked(rows, range(first, first + batch)) for first in firsts]
    if count >= batch:
        return batches
    (one,) = batches
    padded = one if isinstance(one, Batch) else Batch(one, np.ones_like(one))
    once = np.arange(batch)[:, None] < count
    return [dataclasses.replace(padded, segments=padded.segments * once)]


class DataLoader:
    """A step's batch: a global array [B, T + 1] (or a Batch of them), of which this process reads
    its rows alone.

    rows: without end. Reading and placing are separate methods, so that a thread can read while the
    devices compute. The first step is 0.
    """

    def __init__(self, rows: grain.MapDataset, *, config: TrainConfig, sharding: NamedSharding):
        self._shape = (config.batch, config.sequence + 1)
        self._sharding = sharding
        self._rows = rows
        share = set()  # of the batch
        for part, _ in sharding.addressable_devices_indices_map(self._shape).values():
            share.update(range(config.batch)[part])
        self._share = sorted(share)

    def abstract(self) -> Any:
        """Shapes and shardings of a batch, to compile for."""

        def shape(leaf):
            return jax.ShapeDtypeStruct(self._shape, leaf.dtype, sharding=self._sharding)

        return jax.tree.map(shape, self.read(0))

    def read(self, step: int) -> Any:
        """This process's rows, on the host. Raises UserError where the data cannot be read."""
        first = int(step) * self._shape[0]
        indices = (first + row for row in self._share)
        return stacked(self._rows, indices)

    def place(self, rows: Any) -> Any:
        """The global arrays of which `read` gave this process's rows."""
        return jax.make_array_from_process_local_data(self._sharding, rows, self._shape)


@contextlib.contextmanager
def read_ahead(read: Callable[[int], Any], *, first: int, last: int) -> Iterator[Iterator[Any]]:
    """Gives an iterator of `read(first)` to `read(last - 1)`, called in a thread; it raises the
    thread's errors.
    """
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD)
    steps = grain.MapDataset.range(first, last)
    results = steps.map(read)
    batches = iter(results.to_iter_dataset(options))
    try:
        yield batches
    finally:
        batches.close()
