"""Every figure of the README: predictions beside what was measured, as JSON."""

import dataclasses
import itertools
from collections.abc import Mapping

from experiments.predict import evaluate, published
from experiments.predict.published import RESIDUALS, Setting
from ladder_jax.predict.machine import Machine

LARGER = ("ladder-1b", "ladder-1.55b")  # the paper's "30 % larger" Ladder, in time: 52 layers for 40
SIZES = ("llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "codellama-34b", "llama-3-70b")


def predictions(machines: Mapping[str, Machine]) -> dict:
    tokens = lambda setting: published.speed(setting, machines).tokens_per_second
    measured = published.tables()
    elsewhere = published.elsewhere()
    times = published.seconds()
    two_nodes = published.two_nodes()
    by_source = {
        source: {setting: value for one, setting, value in elsewhere if one == source}
        for source in dict.fromkeys(one for one, _, _ in elsewhere)
    }
    return {
        "published": [_row(s, value, tokens(s)) for s, value in measured.items()],
        "published_summary": evaluate.errors(measured, tokens).summary(),
        "seconds": [_seconds(s, value, machines) for s, value in times.items()],
        "elsewhere": [{"source": source, **_row(s, value, tokens(s))} for source, s, value in elsewhere],
        "elsewhere_summary": {name: evaluate.errors(found, tokens).summary() for name, found in by_source.items()},
        "two_nodes": [_row(s, value, published.speedup(s, machines)) for s, value in two_nodes.items()],
        "sizes": [_size(name, machines) for name in SIZES],
        "larger": [_larger(tensor, batch, machines) for tensor, batch in itertools.product((2, 4, 8), (1, 4, 16))],
    }


def left_out_summary(results: dict) -> dict[str, dict]:
    """Errors of predictions by constants that were fitted without the figure, or without its whole row."""
    measured = published.tables()
    found = {}
    for kind, rows in results["fit"]["left_out"].items():
        predicted = {_key(row): row["tokens_per_second"] for row in rows}
        found[kind] = evaluate.errors(measured, predicted.__getitem__).summary()
    return found


def _key(row: dict) -> Setting:
    return Setting(**{field.name: row[field.name] for field in dataclasses.fields(Setting)})


def _row(setting: Setting, measured: float, predicted: float) -> dict:
    return {**dataclasses.asdict(setting), "measured": measured, "predicted": predicted}


def _seconds(setting: Setting, measured: tuple[float, float], machines: Mapping[str, Machine]) -> dict:
    found = published.speed(setting, machines)
    pairs = zip(("prefill", "decode"), measured, (found.prefill_seconds, found.decode_seconds))
    return {**dataclasses.asdict(setting), **{name: {"measured": m, "predicted": p} for name, m, p in pairs}}


def _size(name: str, machines: Mapping[str, Machine]) -> dict:
    speedups = {}
    for residual in RESIDUALS[1:]:
        speedups[residual] = published.speedup(Setting(name, "nvlink", 8, 4, residual), machines)
    standard = published.speed(Setting(name, "nvlink", 8, 4, "standard"), machines).tokens_per_second
    return {"model": name, "standard": standard, "speedup": speedups}


def _larger(tensor: int, batch: int, machines: Mapping[str, Machine]) -> dict:
    speed = lambda model, residual: (
        published.speed(Setting(model, "nvlink", tensor, batch, residual), machines).tokens_per_second
    )
    small, large = LARGER
    return {
        "tensor": tensor,
        "batch": batch,
        "standard": speed(small, "standard"),
        "ladder": speed(small, "ladder"),
        "larger_ladder": speed(large, "ladder"),
    }
