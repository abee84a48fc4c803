"""Which earlier outputs each sublayer of a topology reads: in words, and as a picture for notebooks."""

import enum
import itertools
from collections.abc import Sequence

from ladder_jax.residual.recurrence import Step
from ladder_jax.residual.wires.desync import Desynced, Silent

Layers = Sequence[Sequence[Step]]  # a topology's `layers`
NAMES = ("attention", "MLP")
SHOWN = 4  # layers of a picture
CELL = "padding:1px 8px;text-align:center;border:1px solid #ccc;color:#000"


class Part(enum.Enum):
    """How much of an earlier output a sublayer's input holds: colour and meaning in a picture."""

    SUM = "#4c78a8", "the sum over all ranks"
    OWN = "#f2cf5b", "this rank's own partial sum"
    MEAN = "#72b7b2", "the mean over all ranks"
    NONE = "#ffffff", "nothing yet"


def parts(layers: Layers) -> list[list[Part]]:
    """For each sublayer in order, the part of each sublayer before it that its input holds."""
    held: dict[int, Part] = {}
    rows: list[list[Part]] = []
    pending: list[tuple[int, ...]] = []  # outputs outside the residual, oldest first
    for index, step in ((2 * layer, step) for layer, steps in enumerate(layers) for step in steps):
        outputs = tuple(dict.fromkeys(index + min(sublayer, 1) for sublayer in step.sublayers))
        read = dict(held)
        if not isinstance(step, Desynced | Silent):
            late = pending[-step.delay :] if step.delay else []
            read |= dict.fromkeys(itertools.chain(*late), Part.NONE)
            if step.fresh and pending:
                read |= dict.fromkeys(pending[-1], Part.OWN)
            pending = [*pending, outputs][-step.pending_after :] if step.pending_after else []
            held |= dict.fromkeys(outputs, Part.SUM)
        else:
            held |= dict.fromkeys(outputs, Part.OWN)
            if isinstance(step, Desynced) and step.sync:
                held = {i: Part.MEAN if part is Part.OWN else part for i, part in held.items()}
                held |= dict.fromkeys(outputs, Part.SUM)
        rows += [[read.get(before, Part.NONE) for before in range(output)] for output in outputs]
    return rows


def words(layers: Layers) -> str:
    """A few lines: the number of all-reduces, and what the layers of each kind read."""
    steps = [step for layer in layers for step in layer]
    count = sum(step.reduces for step in steps)
    kinds: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(_layer_words(layer), []).append(number)
    lines = [f"  layer{'s'[: len(numbers) > 1]} {_ranges(numbers)}: {text}" for text, numbers in kinds.items()]
    head = f"Topology of {len(layers)} layers, {2 * len(layers)} sublayers, {count} all-reduces"
    return "\n".join([head, *lines])


def html(layers: Layers) -> str:
    """A table: a row for each sublayer of a few layers, a column for each output, coloured by the part that is read."""
    kinds = [_layer_words(layer) for layer in layers]
    change = next((number for number in range(1, len(kinds)) if kinds[number] != kinds[number - 1]), 0)
    first = max(0, min(change - SHOWN // 2, len(layers) - SHOWN))
    shown = range(2 * first, 2 * min(first + SHOWN, len(layers)))

    def cell(text, colour="#eee", tag="td"):
        return f'<{tag} style="{CELL};background:{colour}">{text}</{tag}>'

    def name(sublayer):
        return f"{NAMES[sublayer % 2]} {sublayer // 2}"

    rows = [[cell("reads the output of", tag="th"), *(cell(name(column), tag="th") for column in shown[:-1])]]
    for sublayer, read in enumerate(parts(layers)):
        if sublayer in shown:
            cells = [cell("", part.value[0]) for part in read[shown.start :]]
            rows.append([cell(name(sublayer), tag="th"), *cells])
    used = dict.fromkeys(part for row in parts(layers) for part in row)
    legend = "".join(cell(part.value[1], part.value[0]) for part in Part if part in used)
    table = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<pre>{words(layers)}</pre><table>{table}</table><table><tr>{legend}</tr></table>"


def _layer_words(layer):
    first, *second = map(_step_words, layer)
    if not second:
        return f"attention and MLP read {first}; one all-reduce for both"
    both = f"attention and MLP read {first}"
    return both if [first] == second else f"attention reads {first}; MLP reads {second[0]}"


def _step_words(step):
    if isinstance(step, Desynced):
        return "their rank's own stream, which each all-reduce makes equal on all ranks"
    if isinstance(step, Silent):
        return "their rank's own stream: no rank sees the others'"
    if step.delay == 0:
        return "every output before them"
    late = "the newest output" if step.delay == 1 else f"the {step.delay} newest outputs"
    if step.early:
        return f"all but {late}, all-reduced meanwhile with the shared expert's"
    if step.fresh:
        return f"all but the other ranks' part of {late}, all-reduced meanwhile"
    return f"all but {late}, all-reduced meanwhile"


def _ranges(numbers):
    """0-3, 6, 8-9; shortened after a few."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(shown[:8]) + (f", ... ({len(numbers)} in all)" if len(shown) > 8 else "")
