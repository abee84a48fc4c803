"""The result of `ladder-jax overlap` as JSON; text.py formats it for a terminal."""

import dataclasses
from collections.abc import Sequence

from ladder_jax.config import ExpertParallelism, Phase
from ladder_jax.overlap import request as requests
from ladder_jax.overlap.record import Record
from ladder_jax.overlap.request import Request
from ladder_jax.schedule import grouped, hlo, judge, shards, traffic
from ladder_jax.schedule.collectives import Collective
from ladder_jax.schedule.grouped import Form
from ladder_jax.schedule.report import Other, Reduction, Report, Transfer, hidden, hidden_bytes
from ladder_jax.schedule.shards import Parameters


@dataclasses.dataclass(frozen=True)
class Result:
    request: Request
    record: Record
    report: Report
    bytes_accessed: int
    experts: Form = Form.KERNELS

    def __repr__(self) -> str:
        request = self.request
        title = f"{request.model}, {request.residual}, {request.phase.value} on {request.target.name}"
        return f"Result({title}: {self.verdict})"

    def as_dict(self) -> dict:
        """The JSON object. Counts are those of `schedule.report`; bytes are those of one device.

        flops: of matmuls, without kernels of attention; flops_active: the least of them (see `request.active_flops`).
        parameters: of all layers and tables, over all devices; parameters_active: those that a token passes.
        grouped_matmuls: kernels, expanded by XLA, or of buffers (exchanged rows); absent of a dense model.
        all_reduces, asynchronous, hidden, merged, exposed: of the sublayers' reductions, and of the gathers and
            scatters of a split stream; all_to_alls, all_to_alls_hidden: of the experts' rows.
        bytes_accessed: counted by `schedule.traffic`.
        bytes_accessed_by_compiler: the compiler's own count, null if it gives none. It counts a loop's body once, a
            prefetched array up to three times, and on TPUs a cache that attention reads once five times.
        """
        settings = {name: value for name, value in self.request.as_dict().items() if _is_used(name, self.request)}
        report = self.report
        if "launch" in settings:
            settings["launch"] = self.record.launch
        return {
            **settings,
            **{name: getattr(report, name) for name in ("all_reduces", "asynchronous", "hidden", "merged", "exposed")},
            **{name: getattr(report, name) for name in ("all_to_alls", "all_to_alls_hidden")},
            "window_flops_fraction": report.window_flops_fraction,
            "hidden_time_fraction": report.hidden_time_fraction,
            "step_cycles": report.step_cycles,
            "hidden_cycles": report.hidden_cycles,
            "flops": report.flops,
            "flops_active": requests.active_flops(self.request),
            **self._parameters,
            "bytes_accessed": self.bytes_accessed,
            "bytes_accessed_by_compiler": self.record.bytes_accessed,
            "bytes_minimum": self.record.bytes_minimum,
            "bytes_per_device": self.record.bytes_per_device,
            "device_memory": self.request.target.memory,
            "fits": self.fits,
            "verdict": self.verdict,
            "compiler_options": self.record.options,
            "notices": list(self.record.notices),
            "reductions": [_reduction(one) for one in report.reductions],
            "weights_gathers": _transfers(report.gathers),
            "gradients_scatters": _transfers(report.scatters),
            "other_collectives": [_other(one) for one in report.others],
            "other_hidden": report.other_hidden,
            "jax": self.record.jax,
            "compiler": self.record.compiler,
        }

    @property
    def parameters(self) -> Parameters:
        return shards.parameters(self.request.config)

    @property
    def _parameters(self) -> dict:
        counts = {"parameters": self.parameters.held, "parameters_active": self.parameters.active}
        return counts if self.request.config.moe is None else {**counts, "grouped_matmuls": self.experts.value}

    @property
    def fits(self) -> bool | None:
        memory = self.request.target.memory
        used = self.record.bytes_per_device
        return None if memory is None or used is None else used <= memory

    @property
    def verdict(self) -> str:
        return self.report.verdict


def read(request: Request, record: Record) -> Result:
    program, experts = hlo.parse(record.hlo), requests.experts(request)
    form = Form.BUFFERS if request.experts is ExpertParallelism.EXCHANGE else grouped.form(program)
    report = judge.read(program, sublayer_flops=requests.sublayer_flops(request, form=form), experts=experts)
    return Result(request, record, report, traffic.bytes_moved(program, experts=experts), form)


def _reduction(one: Reduction) -> dict:
    """A sublayer's reduction as JSON: its sublayer, its status and its window."""
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


def _transfers(transfers: Sequence[Transfer]) -> dict:
    """Gathers or reduce-scatters of the layers' weights as JSON. The counts are of arrays.

    hidden_bytes_fraction: the share of their bytes that is hidden, null without transfers.
    """
    one = lambda t: {"layer": t.layer, "direction": "backward" if t.backward else "forward", "arrays": t.count}
    return {
        "count": sum(t.count for t in transfers),
        "asynchronous": sum(t.count for t in transfers if not t.collective.synchronous),
        "hidden": hidden(transfers),
        "hidden_bytes_fraction": hidden_bytes(transfers),
        "each": [
            one(t) | {"status": t.status.name.lower(), "window_flops_fraction": t.window} | _collective(t.collective)
            for t in transfers
        ],
    }


def _collective(one: Collective) -> dict:
    fields = ("kind", "bytes", "axes", "executions", "operations", "kernels", "cycles", "op_name")
    return {name: getattr(one, name) for name in fields} | {"synchronous": one.synchronous}


def _is_used(name: str, request: Request) -> bool:
    """Whether the request's phase uses a setting."""
    used = {
        "prompt_length": request.phase is not Phase.DECODE,
        "context": request.phase is Phase.DECODE,
        "launch": request.phase is not Phase.TRAIN,
        "quantize": request.phase is not Phase.TRAIN,
        "remat": request.phase is Phase.TRAIN,
        "fsdp": request.phase is Phase.TRAIN,
        "sequence_parallel": request.phase is not Phase.DECODE,
        "collective_matmul": request.sequence_parallel,
        "interleave": request.phase is not Phase.DECODE,
        "experts": request.config.moe is not None and request.sequence_parallel,
        "capacity": request.capacity is not None,
        "ladder_layers": request.ladder_layers is not None,
    }
    return used.get(name, True)
