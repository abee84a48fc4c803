"""Nine constants, fitted to the paper's tables; and a tenth, the network's, to its ratios on two nodes.

Least squares of the logarithms of predicted over measured, all weighing the same: 56 figures of tokens a second and
12 of seconds, the latter because tokens a second alone hardly tell the prefill's share from the decode steps'.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
from scipy.optimize import least_squares

from experiments.predict import published
from experiments.predict.published import Setting
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.work import AUTHORS, Implementation

# Where a fit starts: plausible, and the same for every fit.
START = {
    "flops_share": 0.5,
    "bandwidth_share": 0.9,
    "launch": 3e-6,
    "contention": 0.5,
    "cache_speed": 1.0,
    "latency": 10e-6,
    "nvlink bandwidth": 200e9,
    "off step": 3e-6,
    "off bandwidth": 80e9,
}
DEVICE = ("flops_share", "bandwidth_share", "launch", "contention")


def apply(constants: dict[str, float]) -> tuple[dict[str, Machine], Implementation]:
    """The package's machines and the authors' implementation, with these constants in them."""
    machines, device = published.shipped(), {name: constants[name] for name in DEVICE}
    made = {}
    for name, one in machines.items():
        own = "off" if name == "off" else "nvlink"
        link = {"latency": constants["latency"], "bandwidth": constants[f"{own} bandwidth"]}
        if own == "off":
            link["step"] = constants["off step"]
        if name == "two nodes" and "network step" in constants:
            link["network"] = dataclasses.replace(one.link.network, step=constants["network step"])
        made[name] = dataclasses.replace(one, **device, link=dataclasses.replace(one.link, **link))
    return made, dataclasses.replace(AUTHORS, cache_speed=constants["cache_speed"])


def fit(*, without: Iterable[Setting] = (), start: dict[str, float] = START) -> dict[str, float]:
    """The constants, fitted to all measurements but those of the settings left out."""
    left_out = set(without)
    tables = {setting: value for setting, value in published.tables().items() if setting not in left_out}
    times = {setting: value for setting, value in published.seconds().items() if setting not in left_out}

    def residuals(logarithms: np.ndarray) -> list[float]:
        machines, implementation = apply(dict(zip(START, np.exp(logarithms))))
        found = {setting: published.speed(setting, machines, implementation) for setting in tables}
        errors = [np.log(found[setting].tokens_per_second / value) for setting, value in tables.items()]
        for setting, (prefill, decode) in times.items():
            errors += [np.log(found[setting].prefill_seconds / prefill), np.log(found[setting].decode_seconds / decode)]
        return errors

    solved = least_squares(residuals, np.log([start[name] for name in START]), xtol=1e-4, ftol=1e-6)
    return {name: float(value) for name, value in zip(START, np.exp(solved.x))}


def fit_network(constants: dict[str, float]) -> float:
    """Seconds of a step between nodes, from what Standard loses to no communication on two of them."""
    bound = {s: ratio for s, ratio in published.two_nodes().items() if s.residual == "no_communication"}

    def residuals(logarithm: np.ndarray) -> list[float]:
        found = apply({**constants, "network step": float(np.exp(logarithm[0]))})
        return [np.log(published.speedup(setting, *found) / ratio) for setting, ratio in bound.items()]

    return float(np.exp(least_squares(residuals, np.log([5e-6]), xtol=1e-5, ftol=1e-7).x[0]))


def fit_all() -> dict:
    """The constants; and predictions of each figure, and of each row of the tables, by constants fitted without it."""
    constants = fit()
    network = fit_network(constants)
    measured = published.tables()
    rows: dict[tuple, list] = {}
    for setting in measured:
        rows.setdefault((setting.link, setting.tensor, setting.batch), []).append(setting)
    left_out = {"figure": {}, "row": {}}
    for kind, groups in (("figure", [[setting] for setting in measured]), ("row", list(rows.values()))):
        for group in groups:
            print(f"leaving out {len(left_out[kind])}/{len(measured)} by {kind}", flush=True)
            machines, implementation = apply(fit(without=group, start=constants))
            for setting in group:
                left_out[kind][setting] = published.speed(setting, machines, implementation).tokens_per_second
    listed = {
        kind: [{**dataclasses.asdict(setting), "tokens_per_second": value} for setting, value in found.items()]
        for kind, found in left_out.items()
    }
    return {"constants": {**constants, "network step": network}, "left_out": listed}
