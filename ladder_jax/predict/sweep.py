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

    @property
    def fits(self) -> bool:
        """Whether the recommended topology's weights and cache have room on a device."""
        return self.chosen.speed.memory <= self.result.request.machine.memory

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


def at_own_link(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.link == 1] or list(points)


def latency(row: Row) -> float:
    """Seconds a user waits for a token."""
    return row.speed.step.seconds


def throughput(point: Point, row: Row) -> float:
    """Tokens a second of a device: what a machine that is given costs."""
    return row.speed.tokens_per_second / point.tensor


def front(points: Sequence[Point]) -> list[tuple[Point, Row]]:
    """Of what fits, at the machine's own link where that is among the points: the rows that no other beats in latency
    and throughput at once, from the shortest latency on; without those that do not communicate."""
    own = [point for point in at_own_link(points) if point.fits]
    rows = [(point, row) for point in own for row in point.result.rows if row.residual != "no-communication"]
    best, kept = 0.0, []
    for point, row in sorted(rows, key=lambda pair: (latency(pair[1]), -throughput(*pair))):
        if throughput(point, row) > best:
            kept.append((point, row))
            best = throughput(point, row)
    return kept
