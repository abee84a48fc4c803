"""Examples in memory, packed into rows."""

import dataclasses
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
    """tokens: int32, of all examples; learnt: bool, likewise; starts: int64 [examples + 1], and the end.

    cut: how many were longer than a row, and lost their end; left_out: how many had nothing to learn in one.
    """

    tokens: np.ndarray
    learnt: np.ndarray
    starts: np.ndarray
    cut: int
    left_out: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(b"examples")
        for array in (self.tokens, self.learnt, self.starts):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def described(self) -> str:
        share = self.learnt.mean() if len(self.learnt) else 0
        parts = [f"{len(self):,} examples of {len(self.tokens):,} tokens, of which {share:.0%} are learnt"]
        parts += [f"{self.cut:,} were cut at a row's end"] if self.cut else []
        parts += [f"{self.left_out:,} left out, with nothing to learn in a row"] if self.left_out else []
        return "; ".join(parts)


def load(path: str, *, tokenizer: Tokenizer, length: int) -> Examples:
    """The examples at `path`, of each no more than a row of `length` + 1 tokens.

    All of them are held in memory, 5 bytes a token. Raises UserError for what is no example, and for fewer than two.
    """
    tokens, learnt, lengths, cut, left_out = [], [], [0], 0, 0
    for where, example in lines.read(path):
        mine, answers = render(example, tokenizer=tokenizer, where=where)
        if not answers[1 : length + 1].any():
            left_out += 1
            continue
        cut += len(mine) > length + 1
        tokens.append(mine[: length + 1])
        learnt.append(answers[: length + 1])
        lengths.append(len(tokens[-1]))
    if len(tokens) < 2:
        raise UserError(f"data.path={path!r} has {len(tokens)} examples to learn from; one to hold out is needed, too")
    return Examples(np.concatenate(tokens), np.concatenate(learnt), np.cumsum(lengths), cut, left_out)


class ExampleRows:
    """A grain data source: rows of T + 1 tokens of the examples `first` to `end` - 1, one row's Batch each."""

    def __init__(self, examples: Examples, *, first: int, end: int, length: int):
        self._examples, self._size = examples, length + 1
        starts = examples.starts[first : end + 1]
        self._rows = pack(starts[:-1], np.diff(starts), row=self._size)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index) -> Batch:
        rows, at = self._rows, 0
        tokens, segments, learnt = np.zeros((3, self._size), np.int32)
        for segment, piece in enumerate(range(rows.first[int(index)], rows.first[int(index) + 1]), start=1):
            source = slice(int(rows.start[piece]), int(rows.start[piece]) + int(rows.length[piece]))
            here = slice(at, at := at + int(rows.length[piece]))
            tokens[here], segments[here] = self._examples.tokens[source], segment
            learnt[here] = self._examples.learnt[source]
        return Batch(tokens, segments, learnt)

    def __repr__(self) -> str:
        return f"ExampleRows({len(self)} of {self._size})"
