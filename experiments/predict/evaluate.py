"""How far predictions are from measurements: errors, ratios to Standard, and the order of the topologies."""

import dataclasses
import statistics
from collections.abc import Callable

from experiments.predict.published import RESIDUALS, Setting

MATTERS = 1.05  # measured speeds that differ by more must come in the right order


@dataclasses.dataclass(frozen=True)
class Errors:
    """each: predicted / measured - 1; ratios: predicted less measured, of speeds over Standard's; wrong: pairs out of
    order."""

    each: dict[Setting, float]
    ratios: dict[Setting, float]
    wrong: tuple[tuple[Setting, Setting], ...]

    def summary(self) -> dict:
        absolute, points = [abs(e) for e in self.each.values()], [abs(e) for e in self.ratios.values()]
        worst = max(self.each, key=lambda setting: abs(self.each[setting]))
        return {
            "figures": len(absolute),
            "median_error": statistics.median(absolute),
            "worst_error": max(absolute),
            "worst_at": dataclasses.asdict(worst),
            "median_ratio_error": statistics.median(points),
            "worst_ratio_error": max(points),
            "pairs_out_of_order": len(self.wrong),
        }


def errors(measured: dict[Setting, float], predict: Callable[[Setting], float]) -> Errors:
    found = {setting: predict(setting) for setting in measured}
    standard = lambda setting: dataclasses.replace(setting, residual="standard")
    ratios = {
        s: found[s] / found[standard(s)] - measured[s] / measured[standard(s)]
        for s in measured
        if s.residual != "standard" and standard(s) in measured
    }
    wrong = tuple(
        (faster, slower)
        for faster in measured
        for slower in (dataclasses.replace(faster, residual=name) for name in RESIDUALS)
        if slower in measured and measured[faster] > MATTERS * measured[slower] and found[faster] <= found[slower]
    )
    return Errors({s: found[s] / measured[s] - 1 for s in measured}, ratios, wrong)
