"""The README's tables, from results.json and compiled.json."""

import json
import statistics

from experiments import readme
from experiments.predict.published import HERE
from experiments.predict.tables import left_out_summary


def sections(results: dict) -> dict[str, str]:
    """The README's tables by name, in Markdown."""
    return {
        "constants": _constants(results),
        "summary": _summaries(results),
        "published": _published(results),
        "seconds": _times(results),
        "elsewhere": _elsewhere(results),
        "two nodes": _two_nodes(results),
        "sizes": _sizes(results),
        "larger": _larger_table(results),
        "fidelities": _fidelities(),
    }


def fill(text: str, results: dict) -> str:
    """`text` with each table between `<!-- table: NAME -->` and `<!-- end -->` made anew."""
    return readme.fill(text, sections(results))


def _table(head: str, rows: list[list[str]]) -> str:
    columns = head.split(" | ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _constants(results: dict) -> str:
    units = {"launch": 1e6, "latency": 1e6, "step": 1e6, "bandwidth": 1e-9}
    names = {"launch": "µs", "latency": "µs", "step": "µs", "bandwidth": "GB/s"}
    rows = []
    for name, value in results["fit"]["constants"].items():
        last = name.split()[-1]
        rows.append([name, f"{value * units.get(last, 1):.3g} {names.get(last, '')}".strip()])
    return _table("constant | fitted", rows)


def _summaries(results: dict) -> str:
    found = {"fitted to all": results["published_summary"]}
    found |= {f"left out: its {kind}": one for kind, one in left_out_summary(results).items()}
    rows = [
        [
            name,
            f"{one['median_error']:.1%}",
            f"{one['worst_error']:.1%}",
            f"{100 * one['median_ratio_error']:.1f}, {100 * one['worst_ratio_error']:.1f}",
            str(one["pairs_out_of_order"]),
        ]
        for name, one in found.items()
    ]
    return _table("constants | median error | worst | ratios: median, worst points | pairs out of order", rows)


def _published(results: dict) -> str:
    groups: dict[tuple, list[dict]] = {}
    for row in results["published"]:
        groups.setdefault((row["link"], row["tensor"], row["batch"]), []).append(row)
    cell = lambda row: f"{row['measured']:.2f}, {row['predicted']:.2f} ({row['predicted'] / row['measured'] - 1:+.1%})"
    rows = [[*map(str, key), *map(cell, members)] for key, members in groups.items()]
    return _table("NVLink | TP | batch | standard | ladder | parallel | no communication", rows)


def _times(results: dict) -> str:
    both = lambda one: f"{one['measured']:.4g}, {one['predicted']:.4g} ({one['predicted'] / one['measured'] - 1:+.1%})"
    rows = [
        [str(r["batch"]), r["residual"].replace("_", " "), both(r["prefill"]), both(r["decode"])]
        for r in results["seconds"]
    ]
    return _table("batch | residual | prefill s | decode s", rows)


def _elsewhere(results: dict) -> str:
    what = {
        "logs": "Llama-3-8B, NVLink, TP 1 to 8, batch 1 to 64",
        "plots": "Llama-3-70B without NVLink, TP 2 and 4",
        "blog": "Llama-3.2-1B and 3B, NVLink, TP 8, batch 4",
    }
    rows = [
        [
            what[name],
            str(one["figures"]),
            f"{one['median_error']:.1%}",
            f"{one['worst_error']:.1%}",
            f"{100 * one['median_ratio_error']:.1f}",
            str(one["pairs_out_of_order"]),
        ]
        for name, one in results["elsewhere_summary"].items()
    ]
    return _table("what | figures | median error | worst | ratios: median points | pairs out of order", rows)


def _two_nodes(results: dict) -> str:
    groups: dict[int, list[dict]] = {}
    for row in results["two_nodes"]:
        groups.setdefault(row["batch"], []).append(row)
    cell = lambda row: f"{row['measured']:.2f}, {row['predicted']:.2f}"
    rows = [[str(batch), *map(cell, members)] for batch, members in groups.items()]
    errors = [abs(row["predicted"] - row["measured"]) for row in results["two_nodes"]]
    points = f"median {100 * statistics.median(errors):.1f} points, worst {100 * max(errors):.1f}"
    return _table("batch | ladder | parallel | no communication", rows) + f"\n\n{points}"


def _sizes(results: dict) -> str:
    known = {(row["model"], row["residual"]): row["measured"] for row in results["elsewhere"] + results["published"]
             if (row["link"], row["tensor"], row["batch"]) == ("nvlink", 8, 4)}  # fmt: skip
    rows = []
    for one in results["sizes"]:
        cells = []
        for residual, predicted in one["speedup"].items():
            standard = known.get((one["model"], "standard"))
            measured = known.get((one["model"], residual))
            cells.append(
                f"{measured / standard:.2f}, {predicted:.2f}" if measured and standard else f"-, {predicted:.2f}"
            )
        rows.append([one["model"], f"{one['standard']:,.0f}", *cells])
    return _table("model | Standard, predicted tokens/s | ladder | parallel | no communication", rows)


def _larger_table(results: dict) -> str:
    rows = [
        [
            str(one["tensor"]),
            str(one["batch"]),
            f"{one['standard']:,.0f}",
            f"{one['ladder'] / one['standard']:.2f}",
            f"{one['larger_ladder'] / one['standard']:.2f}",
        ]
        for one in results["larger"]
    ]
    return _table("TP | batch | Standard 1B, tokens/s | Ladder 1B | Ladder 1.55B", rows)


def _fidelities() -> str:
    rows = []
    for row in json.loads((HERE / "compiled.json").read_text())["rows"]:
        pair = lambda name, form, scale=1: ", ".join(
            form.format(scale * row[which][name]) for which in ("analytic", "compiled")
        )
        cells = [pair("prefill_seconds", "{:.0f}", 1e3), pair("step_seconds", "{:.2f}", 1e3)]
        cells += [pair("step_exposed_seconds", "{:.2f}", 1e3), pair("speedup", "{:.2f}")]
        rows.append([row["target"], row["residual"], *cells])
    return _table("target | residual | prefill ms | step ms | of it exposed | speed-up", rows)
