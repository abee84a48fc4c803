"""The result of `ladder-jax bench` as JSON."""

import dataclasses
import statistics
from collections.abc import Callable

from ladder_jax.bench.measure import Measurement, Samples
from ladder_jax.bench.request import Request

SETTINGS = ("tensor", "share", "prompt_length", "new_tokens", "warmup", "repeats")


@dataclasses.dataclass(frozen=True)
class Result:
    """device: its kind. devices: their number on this machine. versions: of Python, packages and compilers, by name."""

    request: Request
    measurement: Measurement
    device: str
    devices: int
    versions: dict[str, str]
    platform: str

    def __repr__(self) -> str:
        return "\n  ".join([f"Result({self.request.title} on {self.device})", *self.verdict])

    @property
    def notices(self) -> list[str]:
        """Notes that a reader needs to interpret the numbers."""
        if self.request.share:
            return [
                f"one device computes a rank's share of tensor parallelism over {self.request.share}, and communicates"
                " nothing: a ratio here is a topology's overhead, not its speed-up"
            ]
        if self.request.tensor == 1:
            return ["one device communicates nothing: a ratio here is a topology's overhead, not its speed-up"]
        if self.platform == "cpu":
            return [
                "these are simulated devices on one CPU, which never overlaps communication:"
                " ratios of topologies mean nothing here, and all devices share the measured limits"
            ]
        return []

    @property
    def rows(self) -> list[dict]:
        return [_row(one, self.request, self.measurement) for one in self.measurement.samples]

    @property
    def ratios(self) -> list[dict]:
        """Speed-ups over the baseline (`Request.baseline`): median and range over the rounds of the baseline's seconds
        over the variant's."""
        baseline = self.request.baseline
        of_baseline = {one.batch: one for one in self.measurement.samples if one.variant == baseline}
        ratios = []
        for one in self.measurement.samples:
            if one.variant == baseline:
                continue
            against = of_baseline[one.batch]
            ratios.append({
                "residual": one.residual,
                "interleave": one.interleave,
                "against": baseline.residual,
                "batch": one.batch,
                **_ratio("prefill", against.prefill, one.prefill),
                **_ratio("decode", against.decode, one.decode),
                **_ratio("total", _total(against), _total(one)),
            })  # fmt: skip
        return ratios

    @property
    def verdict(self) -> list[str]:
        """One line per variant: its decoding, or of two halves in turn its prefill."""
        lines = []
        for variant in self.request.variants:
            verb, phase = ("prefills", "prefill") if variant.interleave == 2 else ("decodes", "decode")
            parts = []
            for ratio in self.ratios:
                if (ratio["residual"], ratio["interleave"]) == (variant.residual, variant.interleave):
                    median, *ends = (ratio[f"{phase}_ratio{end}"] for end in ("", "_min", "_max"))
                    spread = ", ".join(f"{end:.2f}" for end in ends)
                    parts.append(f"{median:.2f}x {ratio['against']} [{spread}] at batch {ratio['batch']}")
            lines += [f"{variant.name} {verb} {', '.join(parts)}"] if parts else []
        if lines:
            return lines
        parts = [f"{row['tokens_per_second']:,.1f} tokens/s at batch {row['batch']}" for row in self.rows]
        return [f"{self.request.residuals[0]} generates {', '.join(parts)}"]

    def as_dict(self) -> dict:
        """The JSON object. Seconds, bytes and FLOPs are of one device. `_row` defines medians and ranges."""
        settings = dataclasses.asdict(self.request)
        return {
            "model": self.request.model,
            "device": self.device,
            "devices": self.devices,
            "versions": self.versions,
            "layers": self.request.depth,
            **{name: settings[name] for name in SETTINGS},
            "verdict": self.verdict,
            "notices": self.notices,
            "copy": self.measurement.copy.as_dict("bytes_per_second"),
            "matmul": self.measurement.matmul.as_dict("flops_per_second"),
            "rows": self.rows,
            "ratios": self.ratios,
        }


def _row(one: Samples, request: Request, measurement: Measurement) -> dict:
    """The JSON row. Each figure is computed from the median seconds; its _min and _max are over the repeats.

    step_seconds                   decode_seconds / (new_tokens - 1)
    tokens_per_second              batch x new_tokens / (prefill_seconds + decode_seconds)
    tokens_per_second_per_user     that / batch
    bytes_per_second               bytes_per_step / step_seconds
    bandwidth_share                that / the copy's bytes_per_second
    prefill_flops_per_second       prefill_flops / prefill_seconds
    matmul_share                   that / the matmul's flops_per_second
    """
    steps, tokens = request.new_tokens - 1, request.new_tokens
    formulas: dict[str, Callable[[float, float], float]] = {
        "prefill_seconds": lambda p, d: p,
        "decode_seconds": lambda p, d: d,
        "step_seconds": lambda p, d: d / steps,
        "tokens_per_second": lambda p, d: one.batch * tokens / (p + d),
        "tokens_per_second_per_user": lambda p, d: tokens / (p + d),
        "bytes_per_second": lambda p, d: one.step_bytes * steps / d,
        "bandwidth_share": lambda p, d: one.step_bytes * steps / d / measurement.copy.best,
        "prefill_flops_per_second": lambda p, d: one.prefill_flops / p,
        "matmul_share": lambda p, d: one.prefill_flops / p / measurement.matmul.best,
    }
    row = {
        "residual": one.residual,
        "interleave": one.interleave,
        "batch": one.batch,
        "prompt_length": request.prompt_length,
        "new_tokens": tokens,
        "bytes_per_step": one.step_bytes,
        "prefill_flops": one.prefill_flops,
    }
    for name, formula in formulas.items():
        each = [formula(p, d) for p, d in zip(one.prefill, one.decode)]
        row[name] = formula(statistics.median(one.prefill), statistics.median(one.decode))
        row |= {f"{name}_min": min(each), f"{name}_max": max(each)}
    return row | {"prefill_seconds_each": list(one.prefill), "decode_seconds_each": list(one.decode)}


def _total(one: Samples) -> list[float]:
    return [p + d for p, d in zip(one.prefill, one.decode)]


def _ratio(name: str, baseline, seconds) -> dict[str, float]:
    each = [b / s for b, s in zip(baseline, seconds)]
    return {f"{name}_ratio": statistics.median(each), f"{name}_ratio_min": min(each), f"{name}_ratio_max": max(each)}
