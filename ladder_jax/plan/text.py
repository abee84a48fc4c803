"""The answer of `ladder-jax plan` for a terminal."""

from ladder_jax.plan.plans import Answer, Plan

SHOWN = 12  # plans, each with its fastest microbatch; --json has them all
COLUMNS = ("d x f x t", "remat", "stream", "rows", "parts", "GiB", "s a step", "MFU", "waits", "again")
GIB = 2**30


def lines(answer: Answer) -> list:
    """Lines and a table, to be printed by rich."""
    request = answer.request
    room = "" if request.target.memory is None else f", {request.target.memory / GIB:.0f} GiB a device"
    what = (
        f"{request.name}, {request.config.residual}, {request.config.num_layers} layers on {request.target.name}{room};"
    )
    what += f" {request.tokens:,} tokens a step, in sequences of {request.sequence:,}"
    if not answer.plans:
        return [_nothing_fits(answer), what, *_refused(answer)]
    best = answer.plans[0]
    words = " ".join(f"{name}={value}" for name, value in best.candidate.overrides(request).items())
    return [
        f"take {_name(best)}: {_why(answer)}",
        what,
        "",
        _table(answer),
        f"{len(answer.plans)} of {answer.considered} candidates fit: the fastest microbatch of up to {SHOWN} is shown",
        *_refused(answer),
        "d x f x t: mesh.data x fsdp x tensor; stream: split if sequence-parallel; rows: sequences that a shard of the",
        "batch computes at once, in so many parts; GiB of a device: = by the compiler's memory_analysis of the whole",
        "training step, ~ estimated from shapes; the rest by the model of ladder_jax/plan/speed.py, not measured: MFU,",
        "the share of time that waits for transfers, and the FLOPs that are computed again",
        *(
            ["note      a simulated device has no memory of its own, and its speed here is a nominal one"]
            if not room
            else []
        ),
        "",
        f"ladder-jax train {request.name} {words}",
    ]


def _why(answer: Answer) -> str:
    best = answer.plans[0]
    sure = "estimated to fit" if best.confirmed is None else f"it fits ({best.bytes / GIB:.1f} GiB, compiled)"
    if len(answer.plans) == 1:
        return f"{sure}, the only one that does"
    return f"{sure}, and of what fits it is the fastest by the model: {best.speed.seconds:.3g} s a step"


def _nothing_fits(answer: Answer) -> str:
    least, request = answer.smallest, answer.request
    return (
        f"nothing fits: of {answer.considered} candidates the smallest, {_name(least)}, is estimated at"
        f" {least.memory.device / GIB:.1f} GiB of a device's {request.target.memory / GIB:.0f}: take more devices,"
        " shorter sequences or a smaller model"
    )


def _name(plan: Plan) -> str:
    mesh = plan.candidate.mesh
    sizes = ", ".join(f"{name} {size}" for name, size in vars(mesh).items() if size > 1) or "one device"
    split = ", sequence-parallel" if plan.candidate.sequence_parallel else ""
    count = plan.candidate.rows
    rows = "1 sequence" if count == 1 else f"{count} sequences"
    return f"{sizes}{split}, remat {plan.candidate.remat.value}, {rows} at a time"


def _shown(answer: Answer) -> list[Plan]:
    """Of plans that differ in the microbatch alone the first; and all that were compiled, which come first."""
    known, found = set(), []
    for plan in answer.plans:
        alike = plan.candidate.mesh, plan.candidate.remat, plan.candidate.sequence_parallel
        if plan.confirmed is not None or alike not in known:
            found.append(plan)
        known.add(alike)
    return found[:SHOWN]


def _refused(answer: Answer) -> list[str]:
    found = []
    for plan in answer.refused:
        said = plan.confirmed.refusal or f"{plan.bytes / GIB:.1f} GiB compiled"
        found.append(f"too large: {_name(plan)}: {said} (estimated {plan.memory.device / GIB:.1f})")
    return found


def _table(answer: Answer):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in COLUMNS:
        left = name in ("d x f x t", "remat", "stream")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for plan in _shown(answer):
        candidate, speed, mesh = plan.candidate, plan.speed, plan.candidate.mesh
        table.add_row(
            f"{mesh.data} x {mesh.fsdp} x {mesh.tensor}",
            candidate.remat.value,
            "split" if candidate.sequence_parallel else "whole",
            str(candidate.rows),
            str(candidate.accumulate),
            f"{'~' if plan.confirmed is None else '='}{plan.bytes / GIB:.1f}",
            f"{speed.seconds:.3g}",
            f"{speed.mfu:.0%}",
            f"{speed.exposed / speed.seconds:.0%}",
            f"{speed.recomputed:.0%}",
        )
    return table
