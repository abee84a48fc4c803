"""Predictions over sizes, batches and links, and which of them nothing beats."""

import dataclasses
import itertools
from collections.abc import Sequence

from ladder_jax.predict import result
from ladder_jax.predict.request import Request, Sweep
from ladder_jax.predict.result import Result, Row


@dataclasses.dataclass(frozen=True)
class Point:
    """link: how many times as fast as the machine's own."""

    tensor: int
    batch: int
    link: float
    result: Result

    @property
    def chosen(self) -> Row:
        """The row of the recommended topology."""
        named = {row.residual: row for row in self.result.rows}
        return named.get(self.result.advice.residual, self.result.rows[0])

    def as_dict(self) -> dict:
        full = self.result.as_dict()
        return {"link": self.link, **{k: full[k] for k in ("tensor", "batch", "rows", "recommendation")}}


def run(request: Request, sweep: Sweep) -> list[Point]:
    found = []
    for tensor, batch, link in itertools.product(sweep.tensor, sweep.batch, sweep.link):
        machine = request.machine
        if machine.link is not None:
            machine = dataclasses.replace(machine, link=machine.link.faster(link))
        asked = dataclasses.replace(request, machine=machine, tensor=tensor, batch=batch)
        found.append(Point(tensor, batch, link, result.predict(asked)))
    return found


def latency(row: Row) -> float:
    """Seconds a user waits for a token."""
    return row.speed.step.seconds


def throughput(point: Point, row: Row) -> float:
    """Tokens a second of a device: what a machine that is given costs."""
    return row.speed.tokens_per_second / point.tensor


def front(points: Sequence[Point]) -> list[tuple[Point, Row]]:
    """Of all rows but those without communication, at the machine's own link where it is among the points: those that
    no other beats in latency and throughput at once, from the shortest latency on."""
    own = [point for point in points if point.link == 1] or list(points)
    rows = [(point, row) for point in own for row in point.result.rows if row.residual != "no-communication"]
    best, kept = 0.0, []
    for point, row in sorted(rows, key=lambda pair: (latency(pair[1]), -throughput(*pair))):
        if throughput(point, row) > best:
            kept.append((point, row))
            best = throughput(point, row)
    return kept
