"""Predictions over tensor sizes, batches and link speeds, and their Pareto front."""

import dataclasses
import itertools
from collections.abc import Sequence

from ladder_jax.predict import result
from ladder_jax.predict.request import Request, Sweep
from ladder_jax.predict.result import Result, Row


@dataclasses.dataclass(frozen=True)
class Point:
    """link: factor of the machine's link speed."""

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
        """Whether the recommended topology's weights and cache fit into a device's memory."""
        return self.chosen.speed.memory <= self.result.request.machine.memory

    def as_dict(self) -> dict:
        full = self.result.as_dict()
        return {"link": self.link, **{k: full[k] for k in ("tensor", "batch", "rows", "recommendation")}}


def run(request: Request, sweep: Sweep) -> list[Point]:
    points = []
    for tensor, batch, link in itertools.product(sweep.tensor, sweep.batch, sweep.link):
        machine = request.machine
        if machine.link is not None:
            machine = dataclasses.replace(machine, link=machine.link.faster(link))
        varied = dataclasses.replace(request, machine=machine, tensor=tensor, batch=batch)
        points.append(Point(tensor, batch, link, result.predict(varied)))
    return points


def at_own_link(points: Sequence[Point]) -> list[Point]:
    """The points at the machine's own link speed; all points if the sweep leaves that out."""
    return [point for point in points if point.link == 1] or list(points)


def latency(row: Row) -> float:
    """Seconds between two tokens of one user."""
    return row.speed.step.seconds


def throughput(point: Point, row: Row) -> float:
    """Tokens a second and device."""
    return row.speed.tokens_per_second / point.tensor


def front(points: Sequence[Point]) -> list[tuple[Point, Row]]:
    """The Pareto front of latency and throughput, sorted by latency, at the machine's own link speed.

    Without points that do not fit into memory, and without `no-communication`.
    """
    own = [point for point in at_own_link(points) if point.fits]
    rows = [(point, row) for point in own for row in point.result.rows if row.residual != "no-communication"]
    best, pareto = 0.0, []
    for point, row in sorted(rows, key=lambda pair: (latency(pair[1]), -throughput(*pair))):
        if throughput(point, row) > best:
            pareto.append((point, row))
            best = throughput(point, row)
    return pareto
