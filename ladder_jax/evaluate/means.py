"""The mean of a score over questions, and how sure it is."""

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean: the sample's standard deviation (n - 1) over the square root of n; None for a single value.

    As lm-evaluation-harness (lm_eval/api/metrics.py: mean_stderr).
    """
    if len(values) < 2:
        return None
    center = mean(values)
    return math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1)) / math.sqrt(len(values))
