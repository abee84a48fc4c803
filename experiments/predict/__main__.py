"""Is the speed model right? Nine constants fitted to the paper's tables, and what they say of
everything else.

    python -m experiments.predict    # prints the tables of the README, and writes results.json

No accelerator is needed, and none is used: what is measured here was measured by the paper's
authors. The README names the commit that has the fit; results.json keeps its constants, and its
predictions of the figures that it left out.
"""

import dataclasses
import statistics

from experiments import study
from experiments.predict import published
from experiments.predict.published import HERE, Setting, speedup, tokens

RESULTS = HERE / "results.json"
ELSEWHERE = {
    "logs": "Llama-3-8B, NVLink, TP 1 to 8, batch 1 to 64",
    "blog": "Llama-3.2-1B and 3B, NVLink, TP 8, batch 4",
    "plots": "Llama-3-70B without NVLink, TP 2 and 4",
}


def main() -> None:
    study.parser(__doc__, name="predict").parse_args()
    results = {**study.load(RESULTS), **predictions()}
    study.keep(results, file=RESULTS)
    study.show(tables(results), folder=HERE)


# Predictions beside what was measured.


def predictions() -> dict:
    measured, elsewhere = published.tables(), published.elsewhere()
    summaries = {}
    for source in ELSEWHERE:
        of_source = {setting: value for one, setting, value in elsewhere if one == source}
        summaries[source] = published.errors(of_source, tokens)
    return {
        "published": [row(setting, value, tokens(setting)) for setting, value in measured.items()],
        "published_summary": published.errors(measured, tokens),
        "seconds": [seconds(setting, *times) for setting, times in published.seconds().items()],
        "elsewhere": [
            {"source": source, **row(setting, value, tokens(setting))}
            for source, setting, value in elsewhere
        ],
        "elsewhere_summary": summaries,
        "two_nodes": [
            row(setting, value, speedup(setting))
            for setting, value in published.two_nodes().items()
        ],
    }


def row(setting: Setting, measured: float, predicted: float) -> dict:
    return {**dataclasses.asdict(setting), "measured": measured, "predicted": predicted}


def seconds(setting: Setting, prefill: float, decode: float) -> dict:
    found = published.speed(setting)
    return {
        **dataclasses.asdict(setting),
        "prefill": {"measured": prefill, "predicted": found.prefill.seconds},
        "decode": {"measured": decode, "predicted": found.decode_seconds},
    }


# The README's tables.


def tables(results: dict) -> dict[str, str]:
    return {
        "constants": study.table(
            "constant | fitted", map(constant, results["fit"]["constants"].items())
        ),
        "summary": summaries(results),
        "published": study.table(
            "NVLink | TP | batch | standard | ladder | parallel | no communication",
            grouped(results["published"], "link", "tensor", "batch"),
        ),
        "seconds": study.table(
            "batch | residual | prefill s | decode s", map(times, results["seconds"])
        ),
        "elsewhere": elsewhere_table(results),
        "two nodes": two_nodes_table(results["two_nodes"]),
    }


def constant(named: tuple[str, float]) -> list[str]:
    name, value = named
    units = {
        "launch": (1e6, " µs"),
        "latency": (1e6, " µs"),
        "step": (1e6, " µs"),
        "bandwidth": (1e-9, " GB/s"),
    }
    scale, unit = units.get(name.split()[-1], (1, ""))
    return [name, f"{scale * value:.3g}{unit}"]


def pair(one: dict, form: str) -> str:
    """Measured, predicted, and the error."""
    return f"{one['measured']:{form}}, {one['predicted']:{form}} ({one['predicted'] / one['measured'] - 1:+.1%})"


def grouped(rows: list[dict], *keys: str) -> list[list[object]]:
    """A line for each value of the keys, with a cell for each residual."""
    lines: dict[tuple, list] = {}
    for one in rows:
        lines.setdefault(tuple(one[key] for key in keys), []).append(pair(one, ".2f"))
    return [[*place, *cells] for place, cells in lines.items()]


def times(one: dict) -> list[object]:
    return [
        one["batch"],
        one["residual"].replace("_", " "),
        pair(one["prefill"], ".4g"),
        pair(one["decode"], ".4g"),
    ]


def summaries(results: dict) -> str:
    """Of constants fitted to all figures, and to all but the figure or its whole row."""
    found = {"fitted to all": results["published_summary"]}
    measured = published.tables()
    names = [field.name for field in dataclasses.fields(Setting)]
    for kind, rows in results["fit"]["left_out"].items():
        predicted = {
            Setting(*(one[name] for name in names)): one["tokens_per_second"] for one in rows
        }
        found[f"left out: its {kind}"] = published.errors(measured, predicted.__getitem__)
    lines = []
    for name, one in found.items():
        ratios = f"{100 * one['median_ratio_error']:.1f}, {100 * one['worst_ratio_error']:.1f}"
        lines.append([name, *worst(one), ratios, one["pairs_out_of_order"]])
    head = "constants | median error | worst | ratios: median, worst points | pairs out of order"
    return study.table(head, lines)


def worst(summary: dict) -> list[str]:
    return [f"{summary['median_error']:.1%}", f"{summary['worst_error']:.1%}"]


def elsewhere_table(results: dict) -> str:
    lines = []
    for source, one in results["elsewhere_summary"].items():
        ratio = f"{100 * one['median_ratio_error']:.1f}"
        lines.append(
            [ELSEWHERE[source], one["figures"], *worst(one), ratio, one["pairs_out_of_order"]]
        )
    return study.table(
        "what | figures | median error | worst | ratios: median points | pairs out of order", lines
    )


def two_nodes_table(rows: list[dict]) -> str:
    lines: dict[int, list] = {}
    for one in rows:
        lines.setdefault(one["batch"], [one["batch"]]).append(
            f"{one['measured']:.2f}, {one['predicted']:.2f}"
        )
    errors = [100 * abs(one["predicted"] - one["measured"]) for one in rows]
    points = f"median {statistics.median(errors):.1f} points, worst {max(errors):.1f}"
    return (
        study.table("batch | ladder | parallel | no communication", lines.values())
        + f"\n\n{points}"
    )


if __name__ == "__main__":
    main()
