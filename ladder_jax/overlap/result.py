"""The answer of `ladder-jax overlap`: as JSON and as text."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from ladder_jax.config import Phase
from ladder_jax.overlap import request as requests
from ladder_jax.overlap.record import Record
from ladder_jax.overlap.request import Request
from ladder_jax.parallel.collectives import ENTER
from ladder_jax.schedule import hlo, judge, traffic
from ladder_jax.schedule.collectives import Collective
from ladder_jax.schedule.report import Reduction, Report, Status, Transfer


@dataclasses.dataclass(frozen=True)
class Result:
    request: Request
    record: Record
    report: Report
    bytes_accessed: int

    def as_dict(self) -> dict:
        """The JSON object: counts as `schedule.report` defines them, bytes those of one device.

        bytes_accessed: as `schedule.traffic` counts them; bytes_accessed_by_compiler: its own analysis, null
            where there is none. That one counts a loop's body once, what is prefetched up to three times,
            and on TPUs a cache that attention reads once five times.
        """
        asked = {name: value for name, value in self.request.as_dict().items() if _belongs(name, self.request)}
        found = self.report
        return {
            **asked,
            **{name: getattr(found, name) for name in ("all_reduces", "asynchronous", "hidden", "merged", "exposed")},
            "window_flops_fraction": found.window_flops_fraction,
            "hidden_time_fraction": found.hidden_time_fraction,
            "step_cycles": found.step_cycles,
            "hidden_cycles": found.hidden_cycles,
            "bytes_accessed": self.bytes_accessed,
            "bytes_accessed_by_compiler": self.record.bytes_accessed,
            "bytes_minimum": self.record.bytes_minimum,
            "bytes_per_device": self.record.bytes_per_device,
            "device_memory": self.request.target.memory,
            "fits": self.fits,
            "verdict": self.verdict,
            "compiler_options": self.record.options,
            "notices": list(self.record.notices),
            "reductions": [_reduction(one) for one in found.reductions],
            "weights_gathers": _transfers(found.gathers),
            "gradients_scatters": _transfers(found.scatters),
            "other_collectives": [_collective(one) for one in found.others],
            "jax": self.record.jax,
            "compiler": self.record.compiler,
        }

    @property
    def fits(self) -> bool | None:
        memory = self.request.target.memory
        taken = self.record.bytes_per_device
        return None if memory is None or taken is None else taken <= memory

    @property
    def verdict(self) -> str:
        found = self.report
        if not found.all_reduces:
            return "no all-reduces: no sublayer of this program communicates"
        noun = "collectives" if self.request.sequence_parallel else "all-reduces"
        line = f"{found.hidden} of {found.all_reduces} {noun} hidden"
        left = [r for r in found.reductions if r.status is not Status.HIDDEN]
        if not left:
            return line
        if found.merged:
            return f"{line}; {found.merged} were merged by the compiler, which leaves nothing to hide them"
        if found.hidden == 0:
            waits = {Status.SYNCHRONOUS: "synchronous"}
            kinds = ", ".join(sorted({waits.get(r.status, "awaited where it is issued") for r in left}))
            return f"{line}: each is {kinds}"
        if len(left) == 1 and left[0].layer == "last":
            return f"{line}; the last has nothing left to hide under"
        counts = Counter()
        for reduction in left:
            counts[reduction.status] += reduction.count
        return f"{line}; exposed: " + ", ".join(f"{count} {status.value}" for status, count in counts.items())

    def as_text(self) -> list:
        """Lines and tables, to be printed by rich."""
        request, record = self.request, self.record
        what = f"{request.model}, {request.residual}, {request.phase.value}, {request.layers} layers"
        mesh = (f"fsdp {request.fsdp}, " if request.fsdp > 1 else "") + f"tensor {request.tensor}"
        split = ", sequence-parallel" if request.sequence_parallel else ""
        lines = [self.verdict, f"{what}, {mesh}{split}, {request.loop.value}, on {request.target.name}", ""]
        tail = [""]
        if record.bytes_per_device is not None:
            memory = f"{record.bytes_per_device / 2**30:.1f} GiB a device"
            if self.fits is not None:
                room = request.target.memory / 2**30
                memory += f", of {room:.0f}: it fits" if self.fits else f", more than its {room:.0f}: it does NOT fit"
            parts = [("arguments", record.argument_bytes), ("temporaries", record.temporary_bytes)]
            split = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts)
            tail.append(f"memory    {memory} ({split})")
        moved = f"moves     {self.bytes_accessed / 2**30:.2f} GiB through the device's memory"
        if record.bytes_minimum:
            moved += f", {self.bytes_accessed / record.bytes_minimum:.2f} x the weights and cache once"
        tail.append(moved)
        if self.report.hidden_time_fraction is not None:
            share = f"{self.report.hidden_time_fraction:.0%} of the step's estimated compute"
            tail.append(f"time      a hidden reduction is in flight during {share}")
        for name, transfers in (("gathers", self.report.gathers), ("scatters", self.report.scatters)):
            if transfers:
                tail.append(f"{name:<10}{_in_words(transfers)}")
        if self.report.others:
            waiting = sum(one.synchronous for one in self.report.others)
            kinds = "embedding, head, loss, gradients" if request.phase is Phase.TRAIN else "embedding"
            tail.append(f"besides   {len(self.report.others)} other collectives ({kinds}), {waiting} synchronous")
        tail.append(f"compiler  {record.compiler}, jax {record.jax}, {record.seconds:.0f} s")
        tail.append("options   " + (", ".join(f"{k}={v}" for k, v in record.options.items()) or "none"))
        tail += [f"notice    {notice}" for notice in record.notices]
        if request.target.platform == "cuda" and request.phase is not Phase.DECODE:
            tail.append("notice    attention is XLA's here: cuDNN's cannot be compiled without a GPU")
        return [*lines, _table(self.report), *tail]


def read(request: Request, record: Record) -> Result:
    program = hlo.parse(record.hlo)
    found = judge.read(program, sublayer_flops=requests.sublayer_flops(request))
    return Result(request, record, found, traffic.bytes_moved(program))


def _reduction(one: Reduction) -> dict:
    """A sublayer's reduction: whose, what became of it, and what is in its window."""
    return {
        "layer": one.layer,
        "sublayer": one.sublayer,
        "direction": "backward" if one.backward else "forward",
        "status": one.status.name.lower(),
        "window_flops_fraction": one.window,
        **_collective(one.collective),
    }


def _transfers(found: Sequence[Transfer]) -> dict:
    """Of the layers' weights, counted by arrays: how many, how many of them asynchronous and hidden, and each.

    hidden_bytes_fraction: the share of their bytes that is hidden, null where none is moved.
    """
    one = lambda t: {"layer": t.layer, "direction": "backward" if t.backward else "forward", "arrays": t.count}
    return {
        "count": sum(t.count for t in found),
        "asynchronous": sum(t.count for t in found if not t.collective.synchronous),
        "hidden": _hidden(found),
        "hidden_bytes_fraction": _hidden_bytes(found),
        "each": [
            one(t) | {"status": t.status.name.lower(), "window_flops_fraction": t.window} | _collective(t.collective)
            for t in found
        ],
    }


def _in_words(found: Sequence[Transfer]) -> str:
    what = "gradients reduce-scattered" if found[0].collective.kind == "reduce-scatter" else "weights gathered"
    line = f"{_hidden(found)} of {sum(t.count for t in found)} arrays of layers' {what}, hidden"
    line += f" ({_hidden_bytes(found):.0%} of their bytes)"
    left = Counter()
    for t in found:
        if t.status is not Status.HIDDEN:
            left[f"of layer {t.layer or '?'}, {'backward' if t.backward else 'forward'}, {t.status.value}"] += t.count
    return line + "".join(f"; {count} {what}" for what, count in left.items())


def _hidden_bytes(found: Sequence[Transfer]) -> float | None:
    moved = lambda these: sum(t.collective.executions * t.collective.bytes for t in these)
    return moved(t for t in found if t.status is Status.HIDDEN) / moved(found) if found else None


def _hidden(found: Sequence[Transfer]) -> int:
    return sum(t.count for t in found if t.status is Status.HIDDEN)


def _collective(one: Collective) -> dict:
    kept = ("kind", "bytes", "axes", "executions", "operations", "kernels", "cycles", "op_name")
    return {name: getattr(one, name) for name in kept} | {"synchronous": one.synchronous}


def _belongs(name: str, request: Request) -> bool:
    """Whether a setting matters to the phase."""
    elsewhere = {
        "prompt_length": request.phase is not Phase.DECODE,
        "context": request.phase is Phase.DECODE,
        "launch": request.phase is Phase.DECODE,
        "quantize": request.phase is not Phase.TRAIN,
        "remat": request.phase is Phase.TRAIN,
        "fsdp": request.phase is Phase.TRAIN,
        "sequence_parallel": request.phase is not Phase.DECODE,
        "ladder_layers": request.ladder_layers is not None,
    }
    return elsewhere.get(name, True)


def _table(found: Report):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("reduction", "layers", "bytes", "count", "status", "sublayers inside", "cycles inside"):
        table.add_column(name, justify="left" if name in ("reduction", "layers", "status") else "right")
    groups: dict[tuple, list[Reduction]] = {}
    for reduction in found.reductions:
        end = "input" if ENTER in reduction.collective.op_name else "output"
        name = f"{end} of {reduction.sublayer}" if reduction.sublayer else f"last {end}"
        name = f"gradient of the {name}" if reduction.backward else name
        groups.setdefault((name, reduction.collective.bytes, reduction.status), []).append(reduction)
    for (name, size, status), members in groups.items():
        cycles = [r.collective.cycles for r in members if r.collective.cycles is not None]
        table.add_row(
            name,
            _layers([r.layer for r in members]),
            f"{size:,}",
            str(sum(r.count for r in members)),
            status.value,
            _range([r.window for r in members], "{:.2f}"),
            _range(cycles, "{:,}") if cycles else "-",
        )
    return table


def _layers(names: list[str]) -> str:
    numbers = sorted({int(name) for name in names if name.isdigit()})
    if len(numbers) != len(set(names)) or len(numbers) < 3:
        return ", ".join(dict.fromkeys(names))
    steps = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if steps else f"{len(numbers)} layers of {numbers[0]}-{numbers[-1]}"


def _range(values: list, form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} - {high}"
