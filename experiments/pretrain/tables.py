"""The README's tables and the figures, from results.json and meshes.json."""

import json
import pathlib

from experiments.pretrain import figures, plan
from experiments.pretrain.figures import against, loss_at, losses, runs, speedup
from experiments.readme import fill
from ladder_jax import files
from ladder_jax.errors import UserError


def write(folder: pathlib.Path) -> None:
    """README.md's tables (if it is there), study.png and gradients.png beside `folder`/results.json; prints the tables.

    Raises UserError where there are no results.
    """
    from experiments.pretrain import picture

    file = folder / "results.json"
    if not file.is_file():
        raise UserError(f"there is no {str(file)!r}: run the study first, without --tables")
    results = json.loads(file.read_text())
    compiled = folder / "meshes.json"
    found = sections(results, meshes=json.loads(compiled.read_text())["rows"] if compiled.is_file() else [])
    print("\n\n".join(f"{name}\n\n{table}" for name, table in found.items()))
    readme = folder / "README.md"
    if readme.is_file():
        text = fill(readme.read_text(), found)
        files.write_atomically(str(readme), lambda path: pathlib.Path(path).write_text(text))
    picture.curves(results, file=str(folder / "study.png"))
    picture.gradients(results, file=str(folder / "gradients.png"))


def sections(results: dict, *, meshes: list[dict]) -> dict[str, str]:
    """The README's tables by name, in Markdown; those that there are runs, or compiled steps, for."""
    found = {
        "meshes": _meshes(meshes),
        "equal": _equal(results),
        "predicted": _predicted(results),
        "depth": _depths(results),
        "norm": _norms(results),
        "gradients": _gradients(results),
    }
    return {name: text for name, text in found.items() if text}


def table(head: str, rows: list[list[str]]) -> str:
    columns = head.split(" | ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _equal(results: dict) -> str:
    step, standard, rows = results["of_standard"], runs(results, group="main", residual="standard"), []
    of_standard = lambda run: loss_at(run, step)
    for residual in plan.TOPOLOGIES:
        own = runs(results, group="main", residual=residual)
        if not own:
            continue
        faster = speedup(results, residual, shape=plan.SHAPE, machine=plan.MACHINE)
        at_time = lambda run, end=step * faster: loss_at(run, end)
        cells = [residual, str(len(own)), losses(own, step).as_text()]
        cells.append(_gap(against(own, standard, this=of_standard, other=of_standard)))
        cells += [f"{faster:.2f}", f"{step * faster:.0f}", losses(own, step * faster).as_text()]
        cells.append(_gap(against(own, standard, this=at_time, other=of_standard)))
        rows.append(cells)
    head = (
        f"topology | seeds | at {step} steps | less Standard | predicted steps/s, over Standard"
        " | steps in Standard's time | at that step | less Standard"
    )
    return table(head, rows)


def _gap(spread: figures.Spread | None) -> str:
    """Mean difference, and the least and the greatest of a seed."""
    if spread is None:
        return "-"
    if not any(spread.values):
        return "0"
    if len(spread.values) == 1:
        return f"{spread.mean:+.3f}"
    return f"{spread.mean:+.3f} ({min(spread.values):+.3f} to {max(spread.values):+.3f})"


def _predicted(results: dict) -> str:
    rows = []
    for shape in dict.fromkeys(row["shape"] for row in results["predicted"]):
        for machine in plan.MACHINES:
            these = [row for row in results["predicted"] if (row["shape"], row["machine"]) == (shape, machine)]
            cell = lambda row: f"{1e3 * row['seconds']:.1f} ms, {row['speedup']:.2f}"
            rows.append([shape, machine, *map(cell, these)])
    return table(" | ".join(["shape", "machine", *plan.TOPOLOGIES]), rows)


def _depths(results: dict) -> str:
    step = results["of_standard"]
    main = runs(results, group="main", residual="standard") + runs(results, group="main", residual="ladder")
    depths = sorted({run["layers"] for run in runs(results, group="depth") + main})
    if len(depths) < 2:
        return ""
    seeds = {run["seed"] for run in runs(results, group="depth")}
    pick = lambda residual, layers: [
        run for group in ("main", "depth") for run in runs(results, group=group, residual=residual, layers=layers)
        if run["seed"] in seeds
    ]  # fmt: skip
    at = lambda run: loss_at(run, step)
    rows = []
    for layers in depths:
        standard, ladder = pick("standard", layers), pick("ladder", layers)
        if standard and ladder:
            cells = [losses(these, step).as_text() for these in (standard, ladder)]
            rows.append([str(layers), str(len(ladder)), *cells, _gap(against(ladder, standard, this=at, other=at))])
    return table("layers | seeds | standard | ladder | ladder less standard", rows)


NORMS = {"pre": "before each sublayer", "query-key": "and of queries and keys", "shared": "one for both sublayers"}


def _norms(results: dict) -> str:
    step, changed = results["of_standard"], runs(results, group="norm")
    if not changed:
        return ""
    seeds = {run["seed"] for run in changed}
    compared = {"standard": "standard", "ladder": "ladder", "parallel-shared-norm": "parallel"}
    at, rows = lambda run: loss_at(run, step), []
    for residual, plain in compared.items():
        before = [run for run in runs(results, group="main", residual=plain) if run["seed"] in seeds]
        after = [run for run in changed if run["residual"] == residual]
        if before and after:
            cells = [plain, NORMS[after[0]["norm"]], str(len(after)), losses(before, step).as_text()]
            cells += [losses(after, step).as_text(), _gap(against(after, before, this=at, other=at))]
            rows.append(cells)
    return table("topology | norm | seeds | before each sublayer only | with it | difference", rows)


def _gradients(results: dict) -> str:
    rows = []
    for residual in plan.WATCHED:
        measured = [run["gradients"] for run in runs(results, group="main", residual=residual) if "gradients" in run]
        for step in shared_steps(results):
            layers = zip(*(one[step]["layers"] for one in measured))
            cells = [f"{figures.Spread(tuple(values)).mean:.3f}" for values in layers]
            rows += [[residual, step, *cells]] if measured else []
    layers = [f"layer {index}" for index in range(len(rows[0]) - 2)] if rows else []
    return table(" | ".join(["topology", "step", *layers]), rows) if rows else ""


def shared_steps(results: dict) -> list[str]:
    """The steps at which the gradients of all watched runs were measured, in order."""
    measured = [set(run["gradients"]) for run in results["runs"] if "gradients" in run]
    return sorted(set.intersection(*measured), key=int) if measured else []


def _hidden(row: dict) -> tuple[str, str]:
    if row["all_reduces"] is None:
        return "not read: experts are kernels", "-"
    share = lambda found: "-" if found["hidden_bytes_fraction"] is None else f"{found['hidden_bytes_fraction']:.0%}"
    all_reduces = f"{row['hidden']} of {row['all_reduces']}" if row["all_reduces"] else "none there"
    return all_reduces, f"{share(row['gathers'])}, {share(row['scatters'])}"


def _meshes(rows: list[dict]) -> str:
    """What `python -m experiments.pretrain.meshes` found, a row a compiled step."""
    cells = [
        [
            row["recipe"],
            row["target"],
            f"{row['mesh_data']} x {row['mesh_fsdp']} x {row['mesh_tensor']}",
            f"{row['rows']} x {row['accumulate']}",
            f"{row['bytes_per_device'] / 1e9:.1f} of {row['device_memory'] / 1e9:.0f} GB",
            *_hidden(row),
        ]
        for row in rows
    ]
    head = (
        "recipe | target | data x fsdp x tensor | rows at once x accumulated | memory of a chip"
        " | sublayers' all-reduces hidden | bytes hidden of gathers, scatters"
    )
    return table(head, cells) if rows else ""
