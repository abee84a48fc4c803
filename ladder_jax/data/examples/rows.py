"""Examples in memory, packed into rows."""

import dataclasses
import datetime
import hashlib

import numpy as np

from ladder_jax.data.batch import Batch
from ladder_jax.data.examples import lines
from ladder_jax.data.examples.rendering import render
from ladder_jax.data.packing import pack
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Examples:
    """tokens: int32 [n], of all examples. loss_mask: bool [n]. starts: int64 [examples + 1], the last is n.

    cut: the number of examples that were longer than a row and lost their end.
    left_out: the number of examples without any token to predict within a row.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    starts: np.ndarray
    cut: int
    left_out: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(b"examples")
        for array in (self.tokens, self.loss_mask, self.starts):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def summary(self) -> str:
        share = self.loss_mask.mean() if len(self.loss_mask) else 0
        parts = [f"{len(self):,} examples of {len(self.tokens):,} tokens, of which {share:.0%} are predicted"]
        parts += [f"{self.cut:,} were cut at a row's end"] if self.cut else []
        parts += [f"{self.left_out:,} left out, with no token to predict in a row"] if self.left_out else []
        return "; ".join(parts)


def load(path: str, *, tokenizer: Tokenizer, length: int, now: datetime.datetime | None = None) -> Examples:
    """The examples at `path`, each cut to a row of `length` + 1 tokens.

    now: the time of all, for a chat template that asks for it; None: the present.
    All are held in memory, at 5 bytes per token. Raises UserError for a wrong example, and for fewer than two.
    """
    now = now or datetime.datetime.now()
    tokens, loss_mask, lengths, cut, left_out = [], [], [0], 0, 0
    for where, example in lines.read(path):
        row, mask = render(example, tokenizer=tokenizer, where=where, now=now)
        if not mask[1 : length + 1].any():
            left_out += 1
            continue
        cut += len(row) > length + 1
        tokens.append(row[: length + 1])
        loss_mask.append(mask[: length + 1])
        lengths.append(len(tokens[-1]))
    if len(tokens) < 2:
        raise UserError(
            f"data.path={path!r} has {len(tokens)} examples with tokens to predict; it needs two, as one is held out"
        )
    return Examples(np.concatenate(tokens), np.concatenate(loss_mask), np.cumsum(lengths), cut, left_out)


class ExampleRows:
    """A grain data source of packed rows of T + 1 tokens, each one row's Batch, from the examples `first` to `end` - 1.

    length: T.
    """

    def __init__(self, examples: Examples, *, first: int, end: int, length: int):
        self._examples, self._size = examples, length + 1
        starts = examples.starts[first : end + 1]
        self._rows = pack(starts[:-1], np.diff(starts), row=self._size)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index) -> Batch:
        rows, at = self._rows, 0
        tokens, segments, loss_mask = np.zeros((3, self._size), np.int32)
        for segment, piece in enumerate(range(rows.first[int(index)], rows.first[int(index) + 1]), start=1):
            source = slice(int(rows.start[piece]), int(rows.start[piece]) + int(rows.length[piece]))
            target = slice(at, at := at + int(rows.length[piece]))
            tokens[target], segments[target] = self._examples.tokens[source], segment
            loss_mask[target] = self._examples.loss_mask[source]
        return Batch(tokens, segments, loss_mask)

    def __repr__(self) -> str:
        return f"ExampleRows({len(self)} of {self._size})"
