"""The result of `ladder-jax bench` for a terminal: the verdict, a table, the device's limits."""

from ladder_jax.bench.request import Variant
from ladder_jax.bench.result import Result
from ladder_jax.schedule.roofline import Ceiling
from ladder_jax.terminal import Table

COLUMNS = ("batch", "residual", "prefill ms", "step ms", "tokens/s", "range", "GB/s", "of copy", "TFLOP/s", "of matmul")


def lines(answer: Result) -> list:
    """Lines and a table, for `terminal.show`."""
    request = answer.request
    title = f"{request.title} on {answer.device}"
    shape = f"prompt {request.prompt_length}, {request.new_tokens} new tokens, {request.repeats} repeats in turns"
    return [
        *answer.verdict,
        *(f"note: {notice}" for notice in answer.notices),
        f"{title}; {shape}",
        _table(answer.rows),
        f"copy      {_ceiling(answer.measurement.copy, 1e9, 'GB/s')}",
        f"matmul    {_ceiling(answer.measurement.matmul, 1e12, 'TFLOP/s')}",
        "versions  " + ", ".join(f"{name} {version}" for name, version in answer.versions.items()),
    ]


def number(value: float) -> str:
    """Three significant digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(rows: list[dict]) -> Table:
    cells = [
        (
            str(row["batch"]),
            Variant(row["residual"], row["interleave"]).name,
            number(row["prefill_seconds"] * 1e3),
            number(row["step_seconds"] * 1e3),
            number(row["tokens_per_second"]),
            f"{number(row['tokens_per_second_min'])} - {number(row['tokens_per_second_max'])}",
            number(row["bytes_per_second"] / 1e9),
            f"{row['bandwidth_share']:.1%}",
            number(row["prefill_flops_per_second"] / 1e12),
            f"{row['matmul_share']:.1%}",
        )
        for row in rows
    ]
    return Table(COLUMNS, cells, left=("residual",))


def _ceiling(ceiling: Ceiling, scale: float, unit: str) -> str:
    low = number(min(ceiling.rates) / scale)
    return f"{number(ceiling.best / scale)} {unit}, the best of {len(ceiling.rates)} (the worst {low}): {ceiling.array}"
