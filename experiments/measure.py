"""Side-by-side timing: pairs in one process, alternating in order, so that a noisy machine hits both alike."""

import dataclasses
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Seconds of each of two things, measured in turns."""

    first: list[float]
    second: list[float]

    def ratio(self, *, resamples: int = 10_000) -> dict[str, float]:
        """The median of first / second over the pairs, and its 95 % bootstrap interval."""
        return interval(np.array(self.first) / np.array(self.second), resamples=resamples)

    def seconds(self) -> dict[str, float]:
        return {"first_seconds": statistics.median(self.first), "second_seconds": statistics.median(self.second)}


def pairs(first: Callable[[], object], second: Callable[[], object], *, count: int, warmup: int = 3) -> Pairs:
    """`count` interleaved pairs; each call is waited for."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(warmup + count):
        order = (0, 1) if index % 2 else (1, 0)
        for which in order:
            began = time.perf_counter()
            jax.block_until_ready((first, second)[which]())
            elapsed = time.perf_counter() - began
            if index >= warmup:
                times[which].append(elapsed)
    return Pairs(*times)


def interval(ratios: Sequence[float], *, resamples: int = 10_000) -> dict[str, float]:
    """Their median, and its 95 % bootstrap interval."""
    medians = np.median(np.random.default_rng(0).choice(ratios, (resamples, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return {"ratio": float(np.median(ratios)), "ratio_low": float(low), "ratio_high": float(high)}


def environment() -> dict[str, object]:
    import flax

    device = jax.devices()[0]
    return {
        "command": " ".join([pathlib.Path(sys.executable).name, "-m", _module(), *sys.argv[1:]]),
        "device": device.device_kind if device.platform != "cpu" else f"{platform.machine()} CPU",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
    }


def report(results: dict, *, file: pathlib.Path) -> None:
    """Print the results and keep them as JSON."""
    results = {**environment(), **results}
    file.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else "?"
