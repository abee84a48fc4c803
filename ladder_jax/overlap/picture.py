"""Draw simulated timelines of two consecutive layers: Standard's, Standard's in two halves in turn,
and the request's; or write them as a trace.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence

from ladder_jax import files
from ladder_jax.config import Loop
from ladder_jax.errors import UserError
from ladder_jax.hardware import HARDWARE
from ladder_jax.overlap import compile as compiling, request as requests
from ladder_jax.overlap.request import Request
from ladder_jax.schedule import hlo, timeline
from ladder_jax.schedule.cost import sublayer_of
from ladder_jax.schedule.timeline import Bar

# layers of the unrolled program that is drawn: layers 1 and 2 have the schedule of any inner layer
DRAWN = 4
COLOURS = {"attention": "#4c78a8", "mlp": "#72b7b2", "joint": "#4c78a8", "": "#bab0ac"}
MS = 1e3
WIRE, WAIT = "#e45756", "#f7d4d4"
LEGEND = {
    "attention": COLOURS["attention"],
    "MLP": COLOURS["mlp"],
    "other": COLOURS[""],
    "collective": WIRE,
    "waiting for the wire": WAIT,
}


def timelines(request: Request) -> dict[str, list[Bar]]:
    """Simulated timelines of DRAWN unrolled layers of the programs in `drawn`, by their names."""
    bars = {}
    for name, one in drawn(request).items():
        bars[name] = timeline.play(
            hlo.parse(compiling.compiled(one).hlo),
            hardware=HARDWARE[request.target.kind],
            ranks=request.tensor,
            experts=requests.experts(request),
        )
    return bars


def drawn(request: Request) -> dict[str, Request]:
    """Standard, Standard in two halves where the phase and the settings have them, and the
    request's own program: each of DRAWN layers, and of one kind.
    """
    own = dataclasses.replace(request, layers=DRAWN, loop=Loop.UNROLLED, ladder_layers=None)
    standard = dataclasses.replace(own, residual="standard", interleave=1)
    programs = [standard, own]
    halves = dataclasses.replace(standard, interleave=2)
    with contextlib.suppress(UserError):
        requests.check_request(halves)
        programs.insert(1, halves)
    in_turn = lambda one: " in two halves" if one.interleave == 2 else ""
    return {one.residual + in_turn(one): one for one in programs}


def plot(request: Request, *, file: str) -> None:
    """Draw the forward pass of layers 1 and 2 (of 0 to 3). The file's ending sets the format."""
    from matplotlib.patches import Patch

    panels = {name: _two_layers(bars) for name, bars in timelines(request).items()}
    size = (11, 2.1 * len(panels) + 1.2)
    figure, axes = files.panels(len(panels), 1, size=size, sharex=True)
    for axis, (name, bars) in zip(axes, panels.items()):
        end = max(bar.stop for bar in bars)
        axis.barh(1, end * MS, color=WAIT, height=0.6)
        axis.barh(
            [0 if bar.wire else 1 for bar in bars],
            [(bar.stop - bar.start) * MS for bar in bars],
            left=[bar.start * MS for bar in bars],
            color=[WIRE if bar.wire else COLOURS[sublayer_of(bar.op_name)] for bar in bars],
            height=0.6,
        )
        busy = sum(bar.stop - bar.start for bar in bars if not bar.wire)
        waiting = max(0.0, end - busy) / end
        axis.set_title(f"{name}: two layers in {end * MS:.2f} ms, waiting {waiting:.0%}")
        axis.set_yticks([0, 1], ["communication", "compute"])
    axes[-1].set_xlabel("ms")
    legend = [Patch(color=colour, label=label) for label, colour in LEGEND.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend))
    asked = f"{request.model}, {request.phase.value}, tensor {request.tensor}"
    figure.suptitle(
        f"{asked} on {request.target.name}: compiled schedule, times estimated from published speeds,"
        " without latency"
    )
    files.write_picture(file, figure)


def trace(request: Request, *, file: str) -> None:
    """Write Chrome's trace format for https://ui.perfetto.dev: one process per topology, one thread
    per row.
    """
    events = []
    for process, (name, bars) in enumerate(timelines(request).items()):
        events.append(dict(ph="M", pid=process, name="process_name", args={"name": name}))
        for thread, row in enumerate(("compute", "communication")):
            events.append(
                dict(ph="M", pid=process, tid=thread, name="thread_name", args={"name": row})
            )
        events += [
            dict(
                ph="X",
                pid=process,
                tid=int(bar.wire),
                ts=bar.start * 1e6,
                dur=(bar.stop - bar.start) * 1e6,
                name=bar.name,
                args={"op_name": bar.op_name},
            )
            for bar in bars
        ]
    files.write(pathlib.Path(file), [json.dumps({"traceEvents": events}).encode()])


def _two_layers(bars: Sequence[Bar]) -> list[Bar]:
    """The bars between the first forward matmuls of layers 1 and 3, with times from zero.

    They are selected by time, not by the layers' names: a small operation of one layer may run
    during the next.
    """
    matmuls = [
        bar for bar in bars if "dot_general" in bar.op_name and "transpose(" not in bar.op_name
    ]
    of = lambda layer: [bar for bar in matmuls if re.search(rf"layer_{layer}\b", bar.op_name)]
    start = min(bar.start for bar in of(1))
    stop = min(bar.start for bar in of(3))
    overlapping = [bar for bar in bars if bar.stop > start and bar.start < stop]
    clip = lambda time: min(max(time, start), stop) - start
    return [
        dataclasses.replace(bar, start=clip(bar.start), stop=clip(bar.stop)) for bar in overlapping
    ]
