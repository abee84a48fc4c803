"""The verb `plan`: parse the arguments, rank the candidates, print the plans."""

import json

from ladder_jax import terminal
from ladder_jax.config import PRESETS
from ladder_jax.errors import UserError
from ladder_jax.plan import plans
from ladder_jax.plan import request as requests
from ladder_jax.plan.plans import Answer, Plan
from ladder_jax.plan.request import Candidate
from ladder_jax.schedule import shards
from ladder_jax.terminal import Table

# parameters of `requests.make`
OPTIONS = "model target tokens sequence residual layers capacity interleave".split()
SHOWN = 12  # plans in the table, each with its fastest microbatch; --json has all plans
COLUMNS = (
    "dxfxt",
    "remat",
    "sequence-parallel",
    "rows",
    "accumulate",
    "GiB",
    "s a step",
    "MFU",
    "waiting",
    "recomputed",
)
GIB = 2**30


def run(args: dict) -> None:
    """Print the plans. An invalid argument raises UserError before anything is compiled."""
    if args["confirm"] < 0:
        raise UserError(f"--confirm must not be negative, not {args['confirm']}")
    request = requests.make(**{name: args[name] for name in OPTIONS})
    answer = plans.answer(request, compiled=args["confirm"])
    if args["json"]:
        print(json.dumps(plans.as_dict(answer)))
        return
    terminal.show(lines(answer))


def lines(answer: Answer) -> list:
    """Lines and a table, for `terminal.show`."""
    request = answer.request
    room = (
        "" if request.target.memory is None else f", {request.target.memory / GIB:.0f} GiB a device"
    )
    model = f"{request.name}, {request.config.residual}, {request.config.num_layers} layers"
    title = f"{model} on {request.target.name}{room};"
    if request.config.moe is not None:
        count = shards.parameters(request.config)
        title += f" {count.active / 1e9:.3g} of {count.held / 1e9:.3g} billion parameters active;"
    title += f" {request.tokens:,} tokens a step, in sequences of {request.sequence:,}"
    if not answer.plans:
        cure = "nothing fits: take more devices, shorter sequences or a smaller model"
        return [cure, f"reason    {_smallest(answer)}", title, *_refused(answer)]
    best = answer.plans[0]
    overrides = " ".join(
        f"{name}={value}" for name, value in best.candidate.overrides(request).items()
    )
    return [
        f"take {best.candidate}",
        f"reason    {_why(answer)}",
        title,
        _table(answer),
        f"{len(answer.plans)} of {answer.considered} candidates fit: the fastest microbatch of up to {SHOWN} is shown",
        *_refused(answer),
        "dxfxt: mesh.data x fsdp x tensor; rows: sequences in a microbatch of one batch shard, in turn: as two"
        " halves (train.interleave=2); accumulate: microbatches per step; GiB of a device: = from the compiler's"
        " memory_analysis of the whole training step,"
        " ~ estimated from shapes; the other columns are estimates (ladder_jax/plan/speed.py): MFU; waiting: share of"
        " time in which devices wait for transfers; recomputed: FLOPs computed again, over the model's",
        *(
            ["note      a simulated device has no memory limit, and its speed here is nominal"]
            if not room
            else []
        ),
        "",
        f"ladder-jax train {_training(request.name)} {overrides}",
    ]


def _training(name: str) -> str:
    """What `train` takes for the model: a preset or a file as it is, another model as the weights
    to begin with.
    """
    return (
        name
        if name in PRESETS or name.endswith((".yaml", ".yml", ".json"))
        else f"RECIPE.yaml train.start={name}"
    )


def _why(answer: Answer) -> str:
    best = answer.plans[0]
    evidence = (
        "estimated to fit"
        if best.confirmed is None
        else f"it fits ({best.bytes / GIB:.1f} GiB, compiled)"
    )
    if len(answer.plans) == 1:
        return f"{evidence}, the only one that does"
    return f"{evidence}, and among the plans that fit it has the fastest estimate: {best.speed.seconds:.3g} s a step"


def _smallest(answer: Answer) -> str:
    smallest = answer.smallest
    request = answer.request
    return (
        f"of {answer.considered} candidates the smallest, {smallest.candidate}, is estimated at"
        f" {smallest.memory.device / GIB:.1f} GiB of a device's {request.target.memory / GIB:.0f}"
    )


def _shown(answer: Answer) -> list[Plan]:
    """All compiled plans, and of plans that differ only in the microbatch and its halves the first;
    at most SHOWN.
    """
    seen = set()
    shown = []
    for plan in answer.plans:
        key = plan.candidate.mesh, plan.candidate.remat, plan.candidate.sequence_parallel
        if plan.confirmed is not None or key not in seen:
            shown.append(plan)
        seen.add(key)
    return shown[:SHOWN]


def _refused(answer: Answer) -> list[str]:
    refused_lines = []
    for plan in answer.refused:
        reason = plan.confirmed.refusal or f"{plan.bytes / GIB:.1f} GiB compiled"
        refused_lines.append(
            f"too large: {plan.candidate}: {reason} (estimated {plan.memory.device / GIB:.1f})"
        )
    return refused_lines


def _stream(candidate: Candidate) -> str:
    return "exchange" if candidate.exchanges else "yes" if candidate.sequence_parallel else "no"


def _table(answer: Answer) -> Table:
    rows = []
    for plan in _shown(answer):
        candidate = plan.candidate
        speed = plan.speed
        mesh = plan.candidate.mesh
        rows.append((
            f"{mesh.data}x{mesh.fsdp}x{mesh.tensor}",
            candidate.remat.value,
            _stream(candidate),
            f"{candidate.rows}, in turn" if candidate.interleave == 2 else str(candidate.rows),
            str(candidate.accumulate),
            f"{'~' if plan.confirmed is None else '='}{plan.bytes / GIB:.1f}",
            f"{speed.seconds:.3g}",
            f"{speed.mfu:.0%}",
            f"{speed.exposed / speed.seconds:.0%}",
            f"{speed.recomputed:.0%}",
        ))  # fmt: skip
    return Table(COLUMNS, rows, left=("dxfxt", "remat", "sequence-parallel"))
