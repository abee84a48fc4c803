"""The README's tables and the figure, from results.json."""

import json
import pathlib
import statistics

from experiments.pretrain.tables import table
from experiments.readme import fill
from experiments.refit import tasks
from experiments.refit.plan import SENSITIVE, Row, Way
from ladder_jax import files
from ladder_jax.errors import UserError

HEAD = "wikitext"
"""The domain of the tables' losses, the one that all rows are scored on."""
LAYERS = {"0": "original", "30": "all 30", "15": "last 15"} | {
    layers: f"{count} least sensitive" for count, layers in SENSITIVE.items()
}


def write(folder: pathlib.Path) -> None:
    """README.md's tables (if it is there) and refit.png beside `folder`/results.json; prints the tables.

    Raises UserError where there are no results.
    """
    from experiments.refit import picture

    file = folder / "results.json"
    if not file.is_file():
        raise UserError(f"there is no {str(file)!r}: run the study first, without --tables")
    rows = json.loads(file.read_text())["rows"]
    sections = {"kinds": kinds(rows), "settings": settings(rows), "domains": domains(rows)}
    measured = folder / tasks.NAME
    if measured.is_file():
        sections["tasks"] = on_tasks(json.loads(measured.read_text())["models"])
    needed = folder / "memory.json"
    if needed.is_file():
        sections["memory"] = memory(json.loads(needed.read_text())["rows"])
    print("\n\n".join(sections.values()))
    readme = folder / "README.md"
    if readme.is_file():
        text = fill(readme.read_text(), sections)
        files.write_atomically(str(readme), lambda path: pathlib.Path(path).write_text(text))
    picture.plot(rows, file=str(folder / "refit.png"))


def title(row: dict) -> str:
    """Such as "last 15, ladder-2"."""
    layers = LAYERS[row["layers"]]
    return layers if row["residual"] == "ladder" else f"{layers}, {row['residual']}"


def loss(row: dict) -> float:
    return row["losses"][HEAD]


def original(rows: list[dict]) -> dict:
    return next(row for row in rows if row["layers"] == "0" and row["way"] == Way.NONE.value)


def plain(rows: list[dict], row: dict) -> dict | None:
    """The same conversion, without a refit."""
    alike = lambda one: all(one[name] == row[name] for name in ("layers", "residual"))
    return next((one for one in rows if alike(one) and one["way"] == Way.NONE.value), None)


def usual(row: dict) -> bool:
    """Whether a row differs from the study's usual refit by the conversion alone."""
    default = Row().asked
    return all(row.get(name) == default[name] for name in ("way", "text", "tokens", "seed", "ridge"))


def kinds(rows: list[dict]) -> str:
    """Each conversion, plain and with the usual refit."""
    first, lines = original(rows), []
    for row in filter(usual, rows):
        if (before := plain(rows, row)) is None:
            continue
        cost, left = loss(before) - loss(first), loss(row) - loss(first)
        lines.append(
            [
                title(row),
                f"{loss(before):.3f}",
                f"{loss(row):.3f}",
                f"+{cost:.3f}",
                f"+{left:.3f}",
                f"{1 - left / cost:.0%}",
            ]
        )
    return table("converted | plain | refitted | plain costs | refitted costs | given back", lines)


def settings(rows: list[dict]) -> str:
    """Ladders of the last 15 and of all layers (and the control), other topologies in other ways; seeds together."""
    first, groups = original(rows), {}
    for row in rows:
        chosen = row["residual"] == "ladder" or not usual(row)
        if row["way"] != Way.NONE.value and chosen and row["layers"] in ("0", "15", "30"):
            name = (title(row), row["way"], row["text"], f"{row['tokens']:,}", f"{row['ridge']:g}")
            groups.setdefault(name, []).append(loss(row) - loss(first))
    lines = []
    for name, costs in groups.items():
        spread = f" ± {statistics.stdev(costs):.3f}" if len(costs) > 1 else ""
        lines.append([*name, str(len(costs)), f"{statistics.fmean(costs):+.3f}{spread}"])
    return table("converted | fitted | text | tokens | ridge | seeds | over the original", lines)


def domains(rows: list[dict]) -> str:
    """Rows that are scored on every domain."""
    names = list(original(rows)["losses"])
    lines = []
    for row in rows:
        if list(row["losses"]) == names:
            lines.append([title(row), *_fit(row), *(f"{value:.3f}" for value in row["losses"].values())])
    return table(" | ".join(["converted", "fitted", "calibrated on", *names]), lines)


def _fit(row: dict) -> tuple[str, str]:
    """What was fitted, with the ridge if it is not the usual one, and on what."""
    if row["way"] == Way.NONE.value:
        return "" if row["layers"] == "0" else "plain", ""
    ridge = "" if row["ridge"] == Row().ridge else f", ridge {row['ridge']:g}"
    return row["way"] + ridge, f"{row['tokens']:,} tokens of {row['text']}"


def memory(rows: list[dict]) -> str:
    """What converting a larger model needs, with each refit."""
    cells = lambda row: [row["refit"], f"{row['processor_seconds']:.0f} s", f"{row['peak_bytes'] / 1e9:.2f} GB"]
    return table("refit | processor time | peak memory", map(cells, rows))


def on_tasks(models: list[dict]) -> str:
    """Each model's scores with their standard errors; the answers' also less the first model's, on the same answers."""
    lines, first = [], models[0]
    for model in models:
        found = model["continuation"]
        cells = [f"{found[name]:.0%} ± {found[f'{name}_stderr']:.0%}" for name in ("accuracy", "accuracy_normalised")]
        less = "-" if model is first else "{:+.3f} ± {:.3f}".format(*tasks.loss(model["worked"], less=first["worked"]))
        lines.append([model["name"], *cells, "{:.3f} ± {:.3f}".format(*tasks.loss(model["worked"])), less])
    head = "model | continuation | normalised | worked answers, nats a token | over the first"
    return table(head, lines)
