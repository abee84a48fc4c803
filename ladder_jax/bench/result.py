"""The answer of `ladder-jax bench`: as JSON."""

import dataclasses
import statistics
from collections.abc import Callable

from ladder_jax.bench.measure import Measured, Samples
from ladder_jax.bench.request import Request


@dataclasses.dataclass(frozen=True)
class Result:
    """device: its kind; devices: how many this machine has; versions: of what measured, by name."""

    request: Request
    measured: Measured
    device: str
    devices: int
    versions: dict[str, str]
    platform: str

    @property
    def notices(self) -> list[str]:
        """What a reader must know to read the numbers rightly."""
        if self.request.share:
            return [
                f"one device computes a rank's share of tensor parallelism over {self.request.share}, and communicates"
                " nothing: a ratio here is what a topology costs, not what it hides"
            ]
        if self.request.tensor == 1:
            return ["one device communicates nothing: a ratio here is what a topology costs, not what it hides"]
        if self.platform == "cpu":
            return [
                "these are simulated devices on one CPU, which never overlaps communication:"
                " ratios of topologies mean nothing here, and shares are of limits that all devices share"
            ]
        return []

    @property
    def rows(self) -> list[dict]:
        return [_row(one, self.request, self.measured) for one in self.measured.samples]

    @property
    def ratios(self) -> list[dict]:
        """How many times as fast as the baseline (Standard, or else the first named), round by round: the median
        and the range over the rounds of the baseline's seconds / the residual's."""
        names = self.request.residuals
        baseline = "standard" if "standard" in names else names[0]
        found = {(one.residual, one.batch): one for one in self.measured.samples}
        return [
            {
                "residual": one.residual,
                "against": baseline,
                "batch": one.batch,
                **_ratio("prefill", found[baseline, one.batch].prefill, one.prefill),
                **_ratio("decode", found[baseline, one.batch].decode, one.decode),
                **_ratio("total", _total(found[baseline, one.batch]), _total(one)),
            }
            for one in self.measured.samples
            if one.residual != baseline
        ]

    @property
    def verdict(self) -> list[str]:
        """A line a residual."""
        lines = []
        for name in self.request.residuals:
            parts = [
                f"{r['decode_ratio']:.2f}x {r['against']} [{r['decode_ratio_min']:.2f}, {r['decode_ratio_max']:.2f}]"
                f" at batch {r['batch']}"
                for r in self.ratios
                if r["residual"] == name
            ]
            lines += [f"{name} decodes {', '.join(parts)}"] if parts else []
        if lines:
            return lines
        parts = [f"{row['tokens_per_second']:,.1f} tokens/s at batch {row['batch']}" for row in self.rows]
        return [f"{self.request.residuals[0]} generates {', '.join(parts)}"]

    def as_dict(self) -> dict:
        """Seconds, bytes and FLOPs are those of one device. See `_row` for how medians and ranges belong together."""
        asked = dataclasses.asdict(self.request)
        return {
            "model": self.request.model,
            "device": self.device,
            "devices": self.devices,
            "versions": self.versions,
            "layers": self.request.depth,
            **{name: asked[name] for name in ("tensor", "share", "prompt_length", "new_tokens", "warmup", "repeats")},
            "verdict": self.verdict,
            "notices": self.notices,
            "copy": self.measured.copy.as_dict("bytes_per_second"),
            "matmul": self.measured.matmul.as_dict("flops_per_second"),
            "rows": self.rows,
            "ratios": self.ratios,
        }


def _row(one: Samples, request: Request, measured: Measured) -> dict:
    """Each figure follows from the medians of the seconds beside it; its _min and _max are over the repeats.

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
        "bandwidth_share": lambda p, d: one.step_bytes * steps / d / measured.copy.best,
        "prefill_flops_per_second": lambda p, d: one.prefill_flops / p,
        "matmul_share": lambda p, d: one.prefill_flops / p / measured.matmul.best,
    }
    row = {
        "residual": one.residual,
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
