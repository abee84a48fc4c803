"""The measurements that the model is held to, and its predictions of them by the authors'
implementation.

published.csv, seconds.csv: tables of arXiv 2501.06589, Llama-3-70B on H100s, prompt 1024, 512 new
tokens; tokens a second, and seconds of the prefill and of the 511 decode steps after it.
elsewhere.csv: what the authors published besides, by its `source`:
    logs   github.com/mayank31398/ladder-residual-inference, final-results-512
    plots  the same, tools/plot-70b.py: without NVLink on 2 and on 4 devices
    blog   github.com/Nanami18/Nanami18.github.io, blogs/ladder_residual: models of other sizes
           (its 34B row repeats the figures of 70B at batch 16, and is left out)
two_nodes.csv: the same repository's tools/plot-405b.py, tokens a second over Standard's, 405B on
    two nodes.
"""

import csv
import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Callable

from experiments.predict.authors import Authors
from ladder_jax.config import preset
from ladder_jax.predict import machine, model
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.model import Speed

HERE = pathlib.Path(__file__).parent
RESIDUALS = ("standard", "ladder", "parallel", "no_communication")
MATTERS = 1.05  # measured speeds that differ by more must come in the right order
MACHINES = {"nvlink": "h100-nvlink", "off": "h100-no-nvlink", "two nodes": "h100-2-nodes"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What was measured: `residual` as in the tables' headings."""

    model: str
    link: str
    tensor: int
    batch: int
    residual: str


def tables() -> dict[Setting, float]:
    """The 56 figures of tokens a second."""
    found = {}
    for row in _read("published.csv"):
        for name in RESIDUALS:
            found[_setting(row, "llama-3-70b", name)] = float(row[name])
    return found


def seconds() -> dict[Setting, tuple[float, float]]:
    """Prefill and decode seconds of six of them."""
    rows = _read("seconds.csv")
    times = lambda row: (float(row["prefill_seconds"]), float(row["decode_seconds"]))
    return {_setting(row, "llama-3-70b", row["residual"]): times(row) for row in rows}


def elsewhere() -> list[tuple[str, Setting, float]]:
    """(source, setting, tokens a second)."""
    rows = _read("elsewhere.csv")
    return [
        (
            row["source"],
            _setting(row, row["model"], row["residual"]),
            float(row["tokens_per_second"]),
        )
        for row in rows
    ]


def two_nodes() -> dict[Setting, float]:
    """Tokens a second over Standard's."""
    found = {}
    for row in _read("two_nodes.csv"):
        for name in RESIDUALS[1:]:
            found[Setting("llama-3.1-405b", "two nodes", 16, int(row["batch"]), name)] = float(
                row[name]
            )
    return found


@functools.cache
def shipped() -> dict[str, Machine]:
    """The package's own machines, by the names of links in the tables."""
    return {link: machine.load(name) for link, name in MACHINES.items()}


def speed(setting: Setting) -> Speed:
    return model.speed(
        preset(setting.model, residual=setting.residual.replace("_", "-")),
        machine=shipped()[setting.link],
        tensor=setting.tensor,
        rows=setting.batch,
        implementation=Authors,
    )


def tokens(setting: Setting) -> float:
    """Predicted tokens a second."""
    return speed(setting).tokens_per_second


def speedup(setting: Setting) -> float:
    return tokens(setting) / tokens(standard(setting))


def standard(setting: Setting) -> Setting:
    return dataclasses.replace(setting, residual="standard")


def _setting(row: dict, name: str, residual: str) -> Setting:
    return Setting(name, row["link"], int(row["tensor"]), int(row["batch"]), residual)


def _read(name: str) -> list[dict]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


# How far predictions are from measurements.


def errors(measured: dict[Setting, float], predict: Callable[[Setting], float]) -> dict:
    """Errors are predicted / measured - 1; a ratio's is that of a speed over Standard's, predicted
    less measured.
    """
    found = {setting: predict(setting) for setting in measured}
    absolute = {setting: abs(found[setting] / value - 1) for setting, value in measured.items()}
    both = [
        (s, standard(s)) for s in measured if s.residual != "standard" and standard(s) in measured
    ]
    points = [abs(found[s] / found[base] - measured[s] / measured[base]) for s, base in both]
    worst = max(absolute, key=absolute.__getitem__)
    others = ((s, dataclasses.replace(s, residual=name)) for s in measured for name in RESIDUALS)
    apart = [
        (s, other)
        for s, other in others
        if measured[s] > MATTERS * measured.get(other, measured[s])
    ]
    return {
        "figures": len(absolute),
        "median_error": statistics.median(absolute.values()),
        "worst_error": absolute[worst],
        "worst_at": dataclasses.asdict(worst),
        "median_ratio_error": statistics.median(points),
        "worst_ratio_error": max(points),
        "pairs_out_of_order": sum(found[faster] <= found[slower] for faster, slower in apart),
    }
