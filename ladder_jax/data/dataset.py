"""Training rows from `data.path`: text, examples, a token store, or a mixture of stores."""

import dataclasses
import datetime
import hashlib
import json
import pathlib
import sysconfig

import grain
import numpy as np

from ladder_jax.config import DataConfig, Format, TrainConfig
from ladder_jax.data import batches, examples, mixture
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.store import Store, is_store
from ladder_jax.data.tokenizer import BYTES, Tokenizer
from ladder_jax.errors import UserError
from ladder_jax.files import absolute, is_remote

STDLIB = "stdlib"  # a data.path


@dataclasses.dataclass(frozen=True)
class Dataset:
    """training, held_out: endless rows, each T + 1 tokens, or one row's Batch if documents are packed.

    held_out_rows: the number of held-out rows before they repeat; training_rows likewise, of examples.
    fingerprint: a digest of all tokens and their order. Together with the seed and the step, it determines every batch.
    text: the training text as bytes, uint8; None for other tokenizers and formats.
    notes: lines to show to the user. stages: the last step of each, if there are any (see data/examples/stages.py).
    """

    training: grain.MapDataset
    held_out: grain.MapDataset
    held_out_rows: int
    tokenizer: Tokenizer
    fingerprint: str
    text: np.ndarray | None = None
    training_rows: int | None = None
    notes: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()


def load(
    config: DataConfig,
    *,
    train: TrainConfig,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    began: float | None = None,
) -> Dataset:
    """Load the data of a configuration.

    tokenizer: the tokenizer of the checkpoint that training starts from; the data must have the same. began: when the
    run did, in seconds since 1970: what a chat template that asks for the time is told, in UTC; None: the present.
    Raises UserError if the data is missing, unreadable or too short, or has more different tokens than `vocab_size`.
    """
    path, required = pathlib.Path(config.path).expanduser(), tokenizer
    now = datetime.datetime.now(datetime.UTC) if began is None else datetime.datetime.fromtimestamp(began, datetime.UTC)
    path = absolute(config.path) if is_remote(config.path) else path
    if required is None or config.tokenizer != BYTES:
        tokenizer = tokenizers.load(config.tokenizer)
        _check_same(f"data.tokenizer={config.tokenizer!r}", tokenizer, required)
    if config.format is Format.EXAMPLES:
        if path.suffix in mixture.ENDINGS and path.is_file():
            return _staged(path, config, train, vocab_size, tokenizer, now)
        return _examples(config, train, vocab_size, tokenizer, now)
    if path.suffix in mixture.ENDINGS and path.is_file():
        dataset = _mixed(mixture.read(path), config, train, vocab_size)
    elif path.is_dir() and is_store(path):
        dataset = _stored(Store(path), config, train, vocab_size)
    elif is_remote(path):
        raise UserError(f"data.path={config.path!r}: there is no token store; text is read from local files only")
    else:
        dataset = _text(config, train, vocab_size, tokenizer)
    _check_same(f"the tokens of data.path={config.path!r}", dataset.tokenizer, required)
    return dataset


def _check_same(what: str, tokenizer: Tokenizer, required: Tokenizer | None) -> None:
    if required is not None and tokenizer.name != required.name:
        raise UserError(f"{what}: {tokenizer.name}, but the checkpoint that training starts from has {required.name}")


def _examples(
    config: DataConfig, train: TrainConfig, vocab_size: int, tokenizer: Tokenizer, now: datetime.datetime
) -> Dataset:
    """Packed examples. The last ones are held out."""
    tokenizers.check_vocabulary(tokenizer, vocab_size=vocab_size)
    loaded = examples.load(config.path, tokenizer=tokenizer, length=train.sequence, now=now)
    cut = int(np.clip(len(loaded) - int(len(loaded) * config.validation_fraction), 1, len(loaded) - 1))
    rows = examples.ExampleRows(loaded, first=0, end=cut, length=train.sequence)
    held_out = examples.ExampleRows(loaded, first=cut, end=len(loaded), length=train.sequence)
    return Dataset(
        batches.shuffled(rows, seed=train.seed),
        batches.repeated(held_out),
        len(held_out),
        tokenizer,
        _digest([tokenizer.name, loaded.fingerprint]),
        notes=(loaded.summary(),),
        training_rows=len(rows),
    )


def _staged(
    file: pathlib.Path,
    config: DataConfig,
    train: TrainConfig,
    vocab_size: int,
    tokenizer: Tokenizer,
    now: datetime.datetime,
) -> Dataset:
    """Packed examples of several files, one file after another. Of each the last ones are held out."""
    from ladder_jax.data.examples import stages

    paths = stages.read(file)
    of = lambda path: dataclasses.replace(config, path=str(path))
    parts = [_examples(of(path), train, vocab_size, tokenizer, now) for path in paths]
    last = stages.last_steps([part.training_rows for part in parts], steps=train.steps, path=config.path)
    first, ordered, notes = 0, [], []
    for number, (path, part, end) in enumerate(zip(paths, parts, last), start=1):
        ordered.append(part.training[: (end - first) * train.batch])
        notes.append(f"stage {number} of {len(paths)}: steps {first + 1:,} to {end:,}, {path}, {part.notes[0]}")
        first = end
    rows = [part.held_out_rows for part in parts]
    return Dataset(
        grain.MapDataset.concatenate(ordered).repeat(),
        grain.MapDataset.mix([part.held_out for part in parts], rows),
        sum(rows),
        tokenizer,
        _digest([[part.fingerprint, end] for part, end in zip(parts, last)]),
        notes=tuple(notes),
        stages=last,
    )


def _text(config: DataConfig, train: TrainConfig, vocab_size: int, tokenizer: Tokenizer) -> Dataset:
    """Windows of one long text, cut regardless of its contents."""
    tokenizers.check_vocabulary(tokenizer, vocab_size=vocab_size)
    loaded = read_text(config)
    tokens = text_tokens(loaded.content, tokenizer=tokenizer)
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
        notes=(loaded.summary(config.path),),
    )


def _stored(
    store: Store, config: DataConfig, train: TrainConfig, vocab_size: int, *, seed: int | None = None
) -> Dataset:
    """Packed documents. The last ones are held out."""
    tokenizer = store.tokenizer()
    tokenizers.check_vocabulary(tokenizer, vocab_size=vocab_size)
    if config.tokenizer != BYTES and tokenizers.load(config.tokenizer).name != tokenizer.name:
        raise UserError(
            f"the token store {str(store.folder)!r} is of {tokenizer.name}, not of data.tokenizer={config.tokenizer!r}"
        )
    documents, total = store.manifest.documents, store.manifest.tokens
    if documents < 2:
        raise UserError(f"the token store {str(store.folder)!r} has one document; it needs two, as one is held out")
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
        notes=(f"data: {documents:,} documents of {store.folder}, {total:,} tokens",),
    )


def _mixed(parts: list[mixture.Part], config: DataConfig, train: TrainConfig, vocab_size: int) -> Dataset:
    """Rows of several stores, interleaved by weight. Each store has its own epochs."""
    stores = [Store(part.path) for part in parts]
    # A different seed for each: stores of the same size would otherwise be shuffled in the same order.
    seeds = [(train.seed + index * 0x9E3779B9) % 2**32 for index in range(len(stores))]
    datasets = [_stored(store, config, train, vocab_size, seed=seed) for store, seed in zip(stores, seeds)]
    tokenizer = datasets[0].tokenizer
    for store, dataset in zip(stores, datasets):
        if dataset.tokenizer.name != tokenizer.name:
            raise UserError(
                f"a mixture has one tokenizer: {str(stores[0].folder)!r} is of {tokenizer.name},"
                f" {str(store.folder)!r} of {dataset.tokenizer.name}"
            )
    weights = [part.weight for part in parts]
    mix = lambda rows: grain.MapDataset.mix(rows, weights)
    return Dataset(
        mix([dataset.training for dataset in datasets]),
        mix([dataset.held_out for dataset in datasets]),
        sum(dataset.held_out_rows for dataset in datasets),
        tokenizer,
        _digest([[dataset.fingerprint, weight] for dataset, weight in zip(datasets, weights)]),
        notes=tuple(note for dataset in datasets for note in dataset.notes),
    )


def _digest(content: list) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Text:
    """content: the text's bytes, uint8 [n]. files: how many it is of. skipped: files that are not UTF-8 text.

    cut: whether `data.max_bytes` left something out.
    """

    content: np.ndarray
    files: int
    skipped: int
    cut: bool

    def summary(self, path: str) -> str:
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        line = f"data: {files} of {path}, {len(self.content):,} bytes of text"
        if self.skipped:
            line += f"; left out, as they are not UTF-8 text: {self.skipped:,}"
        return line + ("; the rest is left out by data.max_bytes" if self.cut else "")


def read_text(config: DataConfig) -> Text:
    """The text, at most `data.max_bytes` bytes of it. Raises UserError if there are none.

    For a folder: all files that are UTF-8 text, in the order of their paths.
    """
    if config.path == STDLIB:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        files = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts and "test" not in p.parts]
    else:
        root = pathlib.Path(config.path).expanduser()
        if not root.exists():
            raise UserError(f"data.path={config.path!r} does not exist (a text file, a folder, or {STDLIB!r})")
        files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    parts, size = [], 0
    for file in files:
        if size >= config.max_bytes:
            break
        part = _read_file(file, skip_binary=file != root)
        parts.append(part)
        size += len(part or b"")
    whole = b"\n".join(part for part in parts if part)
    text = whole[: config.max_bytes]
    if not text.strip():
        raise UserError(f"data.path={config.path!r} holds no text")
    skipped = parts.count(None)
    cut = len(text) < len(whole) or len(parts) < len(files)
    return Text(np.frombuffer(text, np.uint8), len(parts) - skipped, skipped, cut)


def _read_file(file: pathlib.Path, *, skip_binary: bool) -> bytes | None:
    """A file's bytes. skip_binary: for a file that is not UTF-8 text, return None rather than raise UserError."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {str(file)!r}: {error.strerror}") from None
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        if skip_binary:
            return None
        raise UserError(f"data.path={str(file)!r} is not UTF-8 text") from None
    return content


def text_tokens(content: np.ndarray, *, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of a text's bytes, [n]."""
    if tokenizer.name == BYTES:
        return content
    # `data.max_bytes` may have cut the last character.
    return np.array(tokenizer.encode(content.tobytes().decode("utf-8", errors="ignore")), np.int32)


def bigram_entropy(text: np.ndarray) -> float:
    """The entropy of a byte given the previous byte, in nats per byte: the best loss of a bigram model."""
    pairs = np.bincount(text[:-1].astype(np.int64) * 256 + text[1:], minlength=65536).reshape(256, 256)
    first = pairs.sum(axis=1, keepdims=True)
    joint = pairs / pairs.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        conditional = np.where(pairs > 0, np.log(pairs / first), 0.0)
    return float(-(joint * conditional).sum())
