"""The verb `overlap`, and its result: read from the compiler's record, as JSON, and for a
terminal.
"""

import dataclasses
from collections.abc import Sequence

from ladder_jax import files, terminal
from ladder_jax.config import Phase
from ladder_jax.config.fields import check
from ladder_jax.hardware import HARDWARE
from ladder_jax.overlap import compile as compiling, picture, request as requests
from ladder_jax.overlap.compile import Record
from ladder_jax.overlap.request import Request
from ladder_jax.schedule import grouped, hlo, judge, models
from ladder_jax.schedule.cost import Costs
from ladder_jax.schedule.grouped import Form
from ladder_jax.schedule.report import Report, Transfer, hidden, hidden_bytes
from ladder_jax.terminal import Table

OPTIONS = [field.name for field in dataclasses.fields(requests.Request) if field.name != "shape"]
GIB = 2**30


def run(args: dict) -> None:
    """Print the report. An invalid argument raises UserError before anything is compiled or
    written.
    """
    files.check_picture("plot", args["plot"])
    files.check_writable("trace", args["trace"], endings=(".json",))
    request = requests.make(**{name: args[name] for name in OPTIONS})
    drawn = args["plot"] or args["trace"]
    kind = request.target.kind
    check(
        not drawn or kind in HARDWARE,
        f"{kind} hides nothing, so there is no timeline: choose a TPU or GPU target",
    )
    check(
        not drawn or request.ladder_layers in (None, "all"),
        f"a timeline shows layers of one kind: leave --ladder-layers {request.ladder_layers} out",
    )
    answer = read(request, compiling.compiled(request))
    terminal.answer(answer, as_json=args["json"])
    if args["plot"]:
        picture.plot(request, file=args["plot"])
    if args["trace"]:
        picture.trace(request, file=args["trace"])


@dataclasses.dataclass(frozen=True)
class Result:
    request: Request
    record: Record
    report: Report
    bytes_accessed: int
    experts: Form = Form.KERNELS

    def as_dict(self) -> dict:
        """The JSON object. Counts are those of `schedule.report`; bytes are those of one device.

        flops: of matmuls, without kernels of attention; flops_active: the least of them (see
            `request.active_flops`).
        parameters: of all layers and tables, over all devices; parameters_active: those that a
            token passes.
        grouped_matmuls: kernels, expanded by XLA, or of buffers (exchanged rows); absent of a dense
            model.
        all_reduces, asynchronous, hidden, merged, exposed: of the sublayers' reductions, and of the
            gathers and scatters of a split stream; all_to_alls, all_to_alls_hidden: of the experts'
            rows.
        bytes_accessed: counted by `schedule.cost.Costs`.
        bytes_accessed_by_compiler: the compiler's own count, null if it gives none. It counts a
            loop's body once, a prefetched array up to three times, and on TPUs a cache that
            attention reads once five times.
        """
        record = self.record
        config = self.request.config
        return {
            **self.request.as_dict(),
            "launch": record.launch,
            **self.report.as_dict(),
            "flops_active": requests.active_flops(self.request),
            **models.parameters(config),
            **({} if config.moe is None else {"grouped_matmuls": self.experts.value}),
            "bytes_accessed": self.bytes_accessed,
            "bytes_accessed_by_compiler": record.bytes_accessed,
            "bytes_minimum": record.bytes_minimum,
            "bytes_per_device": record.bytes_per_device,
            "device_memory": self.request.target.memory,
            "fits": self.fits,
            "compiler_options": record.options,
            "notices": record.notices,
            "jax": record.jax,
            "compiler": record.compiler,
        }

    @property
    def fits(self) -> bool | None:
        memory = self.request.target.memory
        used = self.record.bytes_per_device
        return None if memory is None or used is None else used <= memory

    @property
    def verdict(self) -> str:
        return self.report.verdict

    def lines(self) -> list[str | Table]:
        """For `terminal.show`: the verdict, a table, memory and other collectives."""
        report = self.report
        record = self.record
        lines = [*self.verdict.split("; "), self._title, report.table()]
        lines.append(f"memory    {self._memory}")
        lines += [_moved(one) for one in (report.gathers, report.scatters) if one]
        if report.others:
            lines.append(self._others)
        if not self.request.trains:
            lines.append(f"launch    {record.launch}")
        lines.append(f"compiler  {record.compiler}, jax {record.jax}, {record.seconds:.0f} s")
        notices = [*record.notices]
        if self.request.target.platform == "cuda" and self.request.phase is not Phase.DECODE:
            notices.append("attention is XLA's here: cuDNN's cannot be compiled without a GPU")
        return [*lines, *(f"notice    {notice}" for notice in notices)]

    @property
    def _title(self) -> str:
        one = self.request
        shape = f"{one.layers} layers, tensor {one.tensor}, {one.loop.value}, on {one.target.name}"
        return f"{one.model}, {one.residual}, {one.phase.value}, {shape}"

    @property
    def _others(self) -> str:
        others = self.report.others
        kinds = ", ".join(dict.fromkeys(part for one in others for part in one.purpose.split(", ")))
        count = sum(one.count for one in others)
        return f"other collectives: {count} ({kinds}), {self.report.other_hidden} hidden"

    @property
    def _memory(self) -> str:
        used = f"{self.record.bytes_per_device / GIB:.1f} GiB a device"
        if self.fits is None:
            return used
        room = f"of {self.request.target.memory / GIB:.0f}"
        return f"{used}, {room}: it {'fits' if self.fits else 'does NOT fit'}"


def read(request: Request, record: Record) -> Result:
    program = hlo.parse(record.hlo)
    experts = requests.experts(request)
    form = Form.BUFFERS if request.exchanges else grouped.form(program)
    report = judge.read(
        program,
        sublayer_flops=requests.sublayer_flops(request, form=form),
        experts=experts,
        launched_only=True,
    )
    return Result(request, record, report, Costs(program, experts=experts).bytes_moved, form)


def _moved(transfers: Sequence[Transfer]) -> str:
    count = sum(one.count for one in transfers)
    scattered = transfers[0].collective.kind == "reduce-scatter"
    arrays = "gradients reduce-scattered" if scattered else "weights gathered"
    return (
        f"{hidden(transfers)} of {count} arrays of layers' {arrays}, hidden"
        f" ({hidden_bytes(transfers):.0%} of their bytes)"
    )
