"""What the study's losses say, as numbers: at equal tokens, at equal predicted time, and against the same seed."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Spread:
    """mean and the sample's standard deviation over the seeds (None for one), and the values themselves."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def as_text(self, form: str = "{:.3f}") -> str:
        mean = form.format(self.mean)
        return mean if self.deviation is None else f"{mean} ± {self.deviation:.3f}"


def runs(results: dict, *, group: str, **named: object) -> list[dict]:
    """The runs of a group with these residual, layers, norm, ..., by seed."""
    found = [run for run in results["runs"] if run["group"] == group]
    found = [run for run in found if all(run[name] == value for name, value in named.items())]
    return sorted(found, key=lambda run: run["seed"])


def speedup(results: dict, residual: str, *, shape: str, machine: str) -> float:
    asked = dict(shape=shape, machine=machine, residual=residual)
    (row,) = (row for row in results["predicted"] if all(row[name] == value for name, value in asked.items()))
    return row["speedup"]


def loss_at(run: dict, step: float) -> float:
    """The held-out loss at a step, between two measurements on the line that joins them.

    Raises ValueError for a step that the run did not reach, or that is before the first measurement.
    """
    measured = run["held_out"]
    for (before, low), (after, high) in zip(measured, measured[1:]):
        if before <= step <= after:
            return low + (high - low) * (step - before) / (after - before)
    if len(measured) == 1 and measured[0][0] == step:
        return measured[0][1]
    raise ValueError(f"step {step} is not within the measurements of steps {measured[0][0]} to {measured[-1][0]}")


def losses(these: Iterable[dict], step: float) -> Spread:
    return Spread(tuple(loss_at(run, step) for run in these))


def against(
    these: Iterable[dict], others: Iterable[dict], *, this: Callable[[dict], float], other: Callable[[dict], float]
) -> Spread | None:
    """`this` of a run less `other` of the run of the same seed, over the seeds that both have; None for none.

    Runs of a seed have the same batches, and the same initial values where their parameters are the same.
    """
    by_seed = {run["seed"]: run for run in others}
    pairs = [(run, by_seed[run["seed"]]) for run in these if run["seed"] in by_seed]
    return Spread(tuple(this(one) - other(two) for one, two in pairs)) if pairs else None
