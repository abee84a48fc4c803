"""Predictions over tensor sizes, batches and link speeds, and their Pareto front."""

import dataclasses
import itertools
import re
from collections.abc import Sequence

from ladder_jax.errors import UserError, unknown
from ladder_jax.predict import result
from ladder_jax.predict.request import Request, check_tensor
from ladder_jax.predict.result import Result, Row
from ladder_jax.splits import divisors
from ladder_jax.words import positive, words


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The values to vary.

    link: factors of the machine's link speed. unsplit: tensor sizes that do not divide the model.
    """

    tensor: tuple[int, ...]
    batch: tuple[int, ...]
    link: tuple[float, ...]
    unsplit: tuple[int, ...] = ()


def parse(request: Request, phrases: list[str]) -> Sweep:
    """Parse phrases such as `tensor=1,2,4,8`. An axis without a phrase has the request's value."""
    values: dict[str, tuple] = {"tensor": (request.tensor,), "batch": (request.batch,), "link": (1.0,)}
    for phrase in phrases:
        name, equals, text = phrase.partition("=")
        if name not in values:
            raise unknown("axis of --sweep", name, values)
        if not equals:
            raise UserError(f"--sweep {phrase!r} has no values: write it as in {name}=1,2,4")
        parse = _speed if name == "link" else lambda word: positive(f"sweep {name}", word)
        values[name] = tuple(parse(word) for word in words("sweep", text))
    for tensor in values["tensor"]:
        if tensor > request.machine.devices:
            check_tensor(dataclasses.replace(request, tensor=tensor))
    divisible = set(divisors(request.shape, most=max(values["tensor"])))
    fits = tuple(size for size in values["tensor"] if size in divisible)
    if not fits:
        check_tensor(dataclasses.replace(request, tensor=values["tensor"][0]))
    unsplit = tuple(size for size in values["tensor"] if size not in divisible)
    return Sweep(fits, values["batch"], values["link"], unsplit)


def _speed(word: str) -> float:
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", word) or float(word) == 0:
        raise UserError(f"--sweep link must be factors above 0 as in 0.25,1,4, not {word!r}")
    return float(word)


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


def latency(row: Row) -> float:
    """Seconds between two tokens of one user."""
    return row.speed.step.seconds


def throughput(point: Point, row: Row) -> float:
    """Tokens a second and device."""
    return row.tokens_per_second / point.tensor


def communicating(points: Sequence[Point]) -> list[tuple[Point, Row]]:
    """The rows but `no-communication` of the points that fit into memory, at the machine's own link speed, or at all
    speeds if the sweep leaves that out."""
    own = [point for point in points if point.link == 1] or points
    fitting = [point for point in own if point.fits]
    return [(point, row) for point in fitting for row in point.result.rows if row.residual != "no-communication"]


def front(points: Sequence[Point]) -> list[tuple[Point, Row]]:
    """The Pareto front of latency and throughput, sorted by latency."""
    best = 0.0
    pareto = []
    for point, row in sorted(communicating(points), key=lambda pair: (latency(pair[1]), -throughput(*pair))):
        if throughput(point, row) > best:
            pareto.append((point, row))
            best = throughput(point, row)
    return pareto
