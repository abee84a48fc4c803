"""Rows packed with several documents: the input of a training step, and how documents are packed
into rows of a fixed length with little padding: best fit, longest first.

A document is cut only if it is longer than a row ("Fewer Truncations Improve Language Modeling",
arXiv 2404.10830). The packing depends only on the documents' lengths.
"""

import bisect
import collections
import dataclasses
from collections.abc import Callable

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A pytree of integers [B, T + 1]; a single row's are [T + 1].

    segments: the number of each token's document within its row, from 1; 0 is padding. A token is
    predicted from the earlier tokens of its document, so the first token of a document is not
    predicted.
    loss_mask: 0 for tokens that are input only, such as a prompt's; None to predict all.
    """

    tokens: jax.Array
    segments: jax.Array
    loss_mask: jax.Array | None = None

    @property
    def predicted(self) -> jax.Array:
        """[B, T]: whether position t has a target, token t + 1."""
        before = self.segments[:, :-1]
        after = self.segments[:, 1:]
        same_document = (before == after) & (after != 0)
        if self.loss_mask is None:
            return same_document
        wanted = self.loss_mask[:, 1:] != 0
        return same_document & wanted


@dataclasses.dataclass(frozen=True)
class Targets:
    """One rank's rows: integer tokens [B, T], the next tokens as targets [B, T], and their float32
    weights [B, T].

    segments: as in `Batch`, [B, T]; None if each row is one text.
    """

    tokens: jax.Array
    targets: jax.Array
    weights: jax.Array
    segments: jax.Array | None


class PackedRows:
    """A grain data source: documents packed into rows of T + 1 tokens, one row's Batch each.

    read: gives the tokens [count] from `start` on. starts: int64 [documents + 1], the documents'
    first tokens, and the end. length: T. loss_mask: of all tokens, if there is one.
    """

    def __init__(
        self,
        read: Callable[[int, int], np.ndarray],
        starts: np.ndarray,
        *,
        length: int,
        loss_mask: np.ndarray | None,
    ):
        self._read = read
        self._size = length + 1
        self._loss_mask = loss_mask
        packed = pack(starts[:-1], np.diff(starts), row=self._size)
        self._start, self._length, self._first = packed

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, index) -> Batch:
        """Raises UserError where the tokens cannot be read."""
        mask = self._loss_mask
        at = 0
        tokens, segments, loss_mask = np.zeros((3, self._size), np.int32)
        first, end = self._first[int(index) : int(index) + 2]
        for segment, piece in enumerate(range(first, end), start=1):
            start = int(self._start[piece])
            length = int(self._length[piece])
            here = slice(at, at + length)
            at += length
            tokens[here] = self._read(start, length)
            segments[here] = segment
            if mask is not None:
                loss_mask[here] = mask[start : start + length]
        return Batch(tokens, segments, None if mask is None else loss_mask)


def pack(
    starts: np.ndarray, lengths: np.ndarray, *, row: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start, length, first) of rows of at most `row` tokens that hold every token of the
    documents: row r holds the pieces `first[r]` to `first[r + 1] - 1`. A piece is a range of tokens
    of one document.

    start: int64 [pieces], the index of a piece's first token among the tokens of all documents;
    length: int32 [pieces], in tokens; first: int64 [rows + 1]. starts, lengths:
    [documents], in tokens.

    When a document is cut, the next piece begins with the last token of the piece before. So the
    token after the cut is predicted too: each token except a document's first is predicted exactly
    once.
    Time and memory grow with the number of pieces (20 bytes each in the result), hardly with the
    length of rows.
    """
    starts = np.asarray(starts, np.int64)
    lengths = np.asarray(lengths, np.int64)
    start, length = _cut(starts, lengths, row)
    order = np.argsort(-length, kind="stable")
    row_of = _best_fit(length[order], row)
    pieces = order[np.argsort(row_of, kind="stable")]
    first = np.cumsum(np.append(0, np.bincount(row_of)))
    return start[pieces], length[pieces].astype(np.int32), first


def _cut(starts: np.ndarray, lengths: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of the pieces, each of at most `row` tokens. An empty document has no
    pieces.
    """
    step = row - 1
    least = np.minimum(lengths, 1)
    needed = -((1 - lengths) // step)
    pieces = np.maximum(least, needed)
    before = np.cumsum(pieces) - pieces
    index = np.arange(pieces.sum())
    index -= np.repeat(before, pieces)
    offset = index * step
    left = np.repeat(lengths, pieces) - offset
    return np.repeat(starts, pieces) + offset, np.minimum(left, row)


def _best_fit(lengths: np.ndarray, row: int) -> np.ndarray:
    """The row of each piece. A piece goes to the row that then has the least room left, of several
    to the one that has had this room longest, or to a new row.

    lengths: of the pieces, in descending order.
    """
    row_of = np.empty(len(lengths), np.int64)
    rooms: list[int] = []  # the different amounts of room left in rows, in tokens, ascending
    with_room = collections.defaultdict(collections.deque)  # the rows by their room
    rows = 0
    for piece, length in enumerate(lengths.tolist()):
        at = bisect.bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            chosen = with_room[room].popleft()
            if not with_room[room]:
                del rooms[at]
        else:
            room = row
            chosen = rows
            rows += 1
        row_of[piece] = chosen
        left = room - length
        if left:
            if not with_room[left]:
                bisect.insort(rooms, left)
            with_room[left].append(chosen)
    return row_of
