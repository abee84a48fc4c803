"""Tokenize one part of the sources: the work of a worker process, and its files."""

import array
import dataclasses
import json
import os
import pathlib

import numpy as np

from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.store import documents
from ladder_jax.data.store.sources import Part
from ladder_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Done:
    """A part's counts; see Shard. Its files are named by its digest: .tokens, .offsets and, written last, .json."""

    tokens: int
    documents: int
    empty: int
    skipped: int


def encode(text: str, tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """A document's tokens: its text's, and the token that ends a document, where the tokenizer has one."""
    if tokenizer.name == tokenizers.BYTES:
        return np.frombuffer(text.encode("utf-8"), np.uint8)
    tokens = tokenizer.encode(text) if text else []
    if tokens and tokenizer.stop_ids and tokens[-1] != tokenizer.stop_ids[0]:
        tokens = [*tokens, tokenizer.stop_ids[0]]
    return np.array(tokens, np.uint32)


def write(part: Part, *, folder: pathlib.Path, tokenizer: tokenizers.Tokenizer, dtype: str, field: str) -> Done:
    """Tokenize a part into `folder`. Killed at any moment, it leaves nothing that counts.

    Raises UserError for what is wrong in the sources, or where nothing can be written.
    """
    try:
        return _write(part, folder, tokenizer, dtype, field)
    except OSError as error:
        raise UserError(f"cannot write to {str(folder)!r}: {error.strerror or error}") from None


def _write(part: Part, folder: pathlib.Path, tokenizer: tokenizers.Tokenizer, dtype: str, field: str) -> Done:
    offsets, empty, skipped = array.array("Q", [0]), 0, 0
    paths = {kind: folder / f"{part.digest}.{kind}" for kind in ("tokens", "offsets", "json")}
    partial = {kind: path.with_name(path.name + ".partial") for kind, path in paths.items()}
    with partial["tokens"].open("wb") as out:
        for text in documents.read(part, field=field):
            if text is None:
                skipped += 1
                continue
            tokens = encode(text, tokenizer)
            if not len(tokens):
                empty += 1
                continue
            out.write(tokens.astype(dtype).tobytes())
            offsets.append(offsets[-1] + len(tokens))
    done = Done(offsets[-1], len(offsets) - 1, empty, skipped)
    partial["offsets"].write_bytes(np.array(offsets, "<u8").tobytes())
    partial["json"].write_text(json.dumps(dataclasses.asdict(done)))
    for kind, path in paths.items():
        os.replace(partial[kind], path)
    return done


def find(part: Part, *, folder: pathlib.Path, dtype: str) -> Done | None:
    """The counts of a part that an earlier call wrote; None where its files are missing or cut short."""
    try:
        done = Done(**json.loads((folder / f"{part.digest}.json").read_text()))
        sizes = [(folder / f"{part.digest}.{kind}").stat().st_size for kind in ("tokens", "offsets")]
    except (FileNotFoundError, ValueError, TypeError, RecursionError):
        return None
    return done if sizes == [done.tokens * np.dtype(dtype).itemsize, 8 * (done.documents + 1)] else None


def remove(part: Part, *, folder: pathlib.Path) -> None:
    for kind in ("json", "tokens", "offsets"):
        (folder / f"{part.digest}.{kind}").unlink(missing_ok=True)


class Worker:
    """Writes parts in a process of its own: `start` once there, then `run` for each part."""

    _settings: dict = {}

    @classmethod
    def start(cls, folder: pathlib.Path, tokenizer: str, dtype: str, field: str) -> None:
        _end_with_parent()
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
        cls._settings = dict(folder=folder, tokenizer=tokenizers.load(tokenizer), dtype=dtype, field=field)

    @classmethod
    def run(cls, part: Part) -> Done:
        return write(part, **cls._settings)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    import multiprocessing
    import multiprocessing.connection
    import signal
    import threading

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    parent = multiprocessing.parent_process()

    def watch():
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
