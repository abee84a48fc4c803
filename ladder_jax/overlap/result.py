"""The answer of `ladder-jax overlap`, as JSON; text.py has it for a terminal."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from ladder_jax.config import Phase
from ladder_jax.overlap import request as requests
from ladder_jax.overlap.record import Record
from ladder_jax.overlap.request import Request
from ladder_jax.schedule import hlo, judge, traffic
from ladder_jax.schedule.collectives import Collective
from ladder_jax.schedule.report import Other, Reduction, Report, Status, Transfer, hidden, hidden_bytes


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
            "other_collectives": [_other(one) for one in found.others],
            "other_hidden": found.other_hidden,
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


def _other(one: Other) -> dict:
    return {
        "for": one.purpose,
        "count": one.count,
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
        "hidden": hidden(found),
        "hidden_bytes_fraction": hidden_bytes(found),
        "each": [
            one(t) | {"status": t.status.name.lower(), "window_flops_fraction": t.window} | _collective(t.collective)
            for t in found
        ],
    }


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
