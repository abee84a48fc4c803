"""The result of `ladder-jax overlap` for a terminal: the verdict, a table, memory and traffic."""

from collections import Counter
from collections.abc import Sequence

from ladder_jax.config import CollectiveMatmul, ExpertParallelism, Phase
from ladder_jax.overlap import request as requests
from ladder_jax.overlap.result import Result
from ladder_jax.schedule import text as report_text
from ladder_jax.schedule.grouped import Form
from ladder_jax.schedule.report import Status, Transfer, hidden, hidden_bytes

FORMS = {
    CollectiveMatmul.NONE: "",
    CollectiveMatmul.COMPILER: ", the compiler's collective matmul",
    CollectiveMatmul.RING: ", ring collective matmul",
}


def lines(answer: Result) -> list:
    """Lines and a table, for `terminal.show`."""
    request, record = answer.request, answer.record
    title = f"{request.model}, {request.residual}, {request.phase.value}, {request.layers} layers"
    mesh = (f"fsdp {request.fsdp}, " if request.fsdp > 1 else "") + f"tensor {request.tensor}"
    split = f", sequence-parallel{FORMS[request.collective_matmul]}" if request.sequence_parallel else ""
    if request.interleave == 2:
        split += ", two halves in turn"
    if request.experts is ExpertParallelism.EXCHANGE:
        split += f", experts exchanged with capacity {request.capacity:g}"
    head = [*answer.verdict.split("; "), f"{title}, {mesh}{split}, {request.loop.value}, on {request.target.name}"]
    tail = report_text.explained(answer.report)
    if record.bytes_per_device is not None:
        memory = f"{record.bytes_per_device / 2**30:.1f} GiB a device"
        if answer.fits is not None:
            room = request.target.memory / 2**30
            memory += f", of {room:.0f}: it fits" if answer.fits else f", more than its {room:.0f}: it does NOT fit"
        parts = [("arguments", record.argument_bytes), ("temporaries", record.temporary_bytes)]
        split = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts)
        tail.append(f"memory    {memory} ({split})")
    traffic_line = f"traffic   reads and writes {answer.bytes_accessed / 2**30:.2f} GiB"
    if record.bytes_minimum:
        traffic_line += f": {answer.bytes_accessed / record.bytes_minimum:.2f} times its weights and cache"
    tail.append(traffic_line)
    if request.config.moe is not None:
        tail.append(f"experts   {_experts_line(answer)}")
    if answer.report.hidden_time_fraction is not None:
        share = f"{answer.report.hidden_time_fraction:.0%} of the step's estimated compute"
        tail.append(f"time      a hidden reduction is in flight during {share}")
    for name, transfers in (("gathers", answer.report.gathers), ("scatters", answer.report.scatters)):
        if transfers:
            tail.append(f"{name:<10}{_transfer_line(transfers)}")
    if answer.report.others:
        others = answer.report.others
        kinds = ", ".join(dict.fromkeys(part for one in others for part in one.purpose.split(", ")))
        count, hidden_count = sum(one.count for one in others), answer.report.other_hidden
        tail.append(f"other collectives: {count} ({kinds}), {hidden_count} hidden")
    if request.phase is not Phase.TRAIN:
        tail.append(f"launch    {record.launch}")
    tail.append(f"compiler  {record.compiler}, jax {record.jax}, {record.seconds:.0f} s")
    tail.append("options   " + (", ".join(f"{k}={v}" for k, v in record.options.items()) or "none"))
    tail += [f"notice    {notice}" for notice in record.notices]
    if request.target.platform == "cuda" and request.phase is not Phase.DECODE:
        tail.append("notice    attention is XLA's here: cuDNN's cannot be compiled without a GPU")
    return [*head, report_text.table(answer.report), *tail]


def _experts_line(answer: Result) -> str:
    count, least = answer.parameters, requests.active_flops(answer.request)
    line = f"a token passes {count.active / 1e9:.3g} of {count.held / 1e9:.3g} billion parameters; "
    line += f"{answer.report.flops / least:.2f} times the FLOPs of those are computed"
    if answer.experts is Form.EXPANDED:
        line += ", as XLA expands grouped matmuls here: every row times every expert of its device"
    return line


def _transfer_line(transfers: Sequence[Transfer]) -> str:
    scattered = transfers[0].collective.kind == "reduce-scatter"
    arrays = "gradients reduce-scattered" if scattered else "weights gathered"
    line = f"{hidden(transfers)} of {sum(t.count for t in transfers)} arrays of layers' {arrays}, hidden"
    line += f" ({hidden_bytes(transfers):.0%} of their bytes)"
    not_hidden = Counter()
    for t in transfers:
        if t.status is not Status.HIDDEN:
            kind = f"of layer {t.layer or '?'}, {'backward' if t.backward else 'forward'}, {t.status.value}"
            not_hidden[kind] += t.count
    return line + "".join(f"; {count} {kind}" for kind, count in not_hidden.items())
