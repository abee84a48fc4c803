"""Documents into rows of a fixed length, with hardly any padding: best fit, longest first.

A document is cut only where it is longer than a row ("Fewer Truncations Improve Language Modeling",
arXiv 2404.10830). Which pieces share a row depends on the lengths and on nothing else.
"""

import bisect
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rows:
    """Row r holds the pieces `first[r]` to `first[r + 1] - 1`, each of them a stretch of one document.

    start: int64, a piece's first token, counted from the first of all documents.
    length: int32, in tokens.
    first: int64 [rows + 1].
    """

    start: np.ndarray
    length: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.first) - 1


def pack(starts: np.ndarray, lengths: np.ndarray, *, row: int) -> Rows:
    """Rows of at most `row` tokens that hold every token of documents which start and measure as given.

    The next piece of a document that is cut begins with the last token of the piece before, so that the
    token after the cut is predicted, too: in all, each token but a document's first is predicted once.
    Takes memory and time for the pieces (20 bytes each in the end), hardly more for longer rows.
    """
    start, length = _cut(np.asarray(starts, np.int64), np.asarray(lengths, np.int64), row)
    order = np.argsort(-length, kind="stable")
    row_of = _best_fit(length[order], row)
    by_row = np.argsort(row_of, kind="stable")
    pieces = order[by_row]
    rows = int(row_of.max(initial=-1)) + 1
    first = np.searchsorted(row_of[by_row], np.arange(rows + 1))
    return Rows(start[pieces], length[pieces].astype(np.int32), first)


def _cut(starts: np.ndarray, lengths: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of at most `row` tokens. Empty documents have none."""
    step = row - 1
    pieces = np.where(lengths > row, -((1 - lengths) // step), np.minimum(lengths, 1))
    index = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = index * step
    return np.repeat(starts, pieces) + offset, np.minimum(np.repeat(lengths, pieces) - offset, row)


def _best_fit(lengths: np.ndarray, row: int) -> np.ndarray:
    """The row of each piece; `lengths` fall. Each goes where it leaves the least room, else to a new row.

    Pieces of one length are placed together, into all rows with the same room at once: the time goes with
    how many lengths there are, not with how many pieces.
    """
    row_of = np.empty(len(lengths), np.int64)
    rising = -lengths
    rooms: list[int] = []  # that some row has left, rising
    with_room: dict[int, list[np.ndarray]] = {}  # those rows
    rows = done = 0
    while done < len(lengths):
        length = int(lengths[done])
        end = int(np.searchsorted(rising, -length, side="right"))
        while done < end:
            at = bisect.bisect_left(rooms, length)
            if at == len(rooms):
                room, count = row, -((done - end) // (row // length))
                found, rows = np.arange(rows, rows + count), rows + count
            else:
                room = rooms.pop(at)
                found = np.concatenate(with_room.pop(room))
            each = room // length  # a row takes as many as it can before the next is begun
            used = min(len(found), -((done - end) // each))
            placed = min(each * used, end - done)
            row_of[done : done + placed] = np.repeat(found[:used], each)[:placed]
            full, rest = divmod(placed, each)
            _leave(rooms, with_room, room - each * length, found[:full])
            if rest:
                _leave(rooms, with_room, room - rest * length, found[full : full + 1])
            _leave(rooms, with_room, room, found[used:])
            done += placed
    return row_of


def _leave(rooms: list[int], with_room: dict[int, list[np.ndarray]], room: int, rows: np.ndarray) -> None:
    if room and len(rows):
        if room not in with_room:
            bisect.insort(rooms, room)
        with_room.setdefault(room, []).append(rows)
