"""The verb `checkpoints`: list, verify and prune the checkpoints of a run."""

import dataclasses
import datetime
import json

from ladder_jax import files, terminal
from ladder_jax.checkpoint import saved, store
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.files import AnyPath, absolute, explained


@dataclasses.dataclass(frozen=True)
class Row:
    """One checkpoint. bytes: its size on disk. time: seconds since 1970.

    state: "whole" (verified), "damaged", "unchecked", or "no manifest" (of an older version of this
        program).
    """

    step: int
    path: str
    bytes: int
    time: float | None
    validation_loss: float | None
    state: str
    problems: tuple[str, ...] = ()


def run(args: dict) -> None:
    """Print the list. Raises UserError if there is no checkpoint, and RunFailed, at the end, if one
    is damaged.
    """
    keep = store.parse_keep(args["prune"]) if args["prune"] else None
    path = absolute(args["run"])
    thorough = args["verify"] or keep is not None
    with explained(path, "read"):
        folder = saved.folder_of(path)
        rows = [_row(folder / str(step), thorough=thorough) for step in saved.steps(folder)]
        if not rows:
            raise UserError(f"there is no checkpoint below {str(path)!r}")
    chosen = []
    # Damaged ones are neither counted nor removed: the user decides.
    losses = {row.step: row.validation_loss for row in rows if row.state != "damaged"}
    if keep and losses:
        chosen = store.steps_to_remove(losses, keep=keep)
    failed = {}
    for step in chosen:
        try:
            with explained(folder / str(step), "remove"):
                store.remove(folder / str(step), whole=True)
        except RunFailed as error:
            failed[step] = str(error)
    removed = [step for step in chosen if step not in failed]
    rows = [row for row in rows if row.step not in removed]
    damaged = [row for row in rows if row.state == "damaged"]
    if args["json"]:
        listed = [dataclasses.asdict(row) for row in rows]
        print(json.dumps({"run": str(path), "checkpoints": listed, "removed": removed}))
    else:
        _show(rows, removed)
    if failed:
        raise RunFailed("; ".join(failed.values()))
    if damaged:
        steps = ", ".join(str(row.step) for row in damaged)
        raise RunFailed(
            f"damaged: the checkpoint of step {steps} (train with run.on_damaged=previous goes on without)"
        )


def _row(folder: AnyPath, *, thorough: bool) -> Row:
    problems = []
    written = None
    loss = None
    state = "unchecked"
    try:
        checkpoint = saved.open_checkpoint(folder)
        written = checkpoint.time
        loss = checkpoint.validation_loss
        if not checkpoint.has_manifest:
            state = "no manifest"
        elif thorough:
            problems = saved.verify(folder)
            state = "whole"
    except saved.Damaged as error:  # it could not be read a moment ago, and may be whole now
        problems = saved.verify(folder) or [str(error)]
    except UserError as error:
        problems = [str(error)]
    return Row(
        step=int(folder.name),
        path=str(folder),
        bytes=sum(files.sizes(folder).values()),
        time=written,
        validation_loss=loss,
        state="damaged" if problems else state,
        problems=tuple(problems),
    )


def _show(rows: list[Row], removed: list[int]) -> None:
    cells = []
    for row in rows:
        when = ""
        if row.time is not None:
            when = f"{datetime.datetime.fromtimestamp(row.time):%Y-%m-%d %H:%M:%S}"
        loss = "" if row.validation_loss is None else f"{row.validation_loss:.4f}"
        cells.append((str(row.step), when, f"{row.bytes / 1e6:,.1f}", loss, row.state))
    table = terminal.Table(
        ("step", "written", "MB", "held-out loss", "state"), cells, left=("written", "state")
    )
    problems = [f"step {row.step}: {problem}" for row in rows for problem in row.problems]
    gone = [f"removed: {', '.join(map(str, removed))}"] if removed else []
    terminal.show([table, *problems, *gone])
