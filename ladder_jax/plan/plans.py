"""The verb `plan`: estimate every candidate's memory and speed, rank the candidates that fit, print
the plans.
"""

import dataclasses
from collections.abc import Mapping

from ladder_jax import terminal
from ladder_jax.config import PRESETS
from ladder_jax.errors import UserError
from ladder_jax.plan import memory, speed
from ladder_jax.plan import request as requests
from ladder_jax.plan.confirm import Confirmed, confirm
from ladder_jax.plan.memory import Memory
from ladder_jax.plan.request import Candidate, Request, candidates
from ladder_jax.plan.speed import Speed
from ladder_jax.schedule import models
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
MOST_REFUSED = 4  # number of plans that the compiler refuses before confirmation stops


def run(args: dict) -> None:
    """Print the plans. An invalid argument raises UserError before anything is compiled."""
    if args["confirm"] < 0:
        raise UserError(f"--confirm must not be negative, not {args['confirm']}")
    request = requests.make(**{name: args[name] for name in OPTIONS})
    terminal.answer(answer(request, compiled=args["confirm"]), as_json=args["json"])


@dataclasses.dataclass(frozen=True)
class Plan:
    """limit: bytes of a device's memory, None if unknown (CPU). confirmed: None if the plan was not
    compiled.
    """

    candidate: Candidate
    memory: Memory
    speed: Speed
    limit: int | None
    confirmed: Confirmed | None = None

    @property
    def bytes(self) -> int:
        """The compiler's figure if the plan was compiled, or else the estimate."""
        return self.memory.device if self.confirmed is None else self.confirmed.device

    @property
    def fits(self) -> bool:
        if self.confirmed is not None and self.confirmed.refusal:
            return False
        return self.limit is None or self.bytes <= self.limit


@dataclasses.dataclass(frozen=True, repr=False)
class Answer:
    """The ranked plans of a request.

    plans: all that fit; the first one is recommended. refused: plans whose compiled step does not
        fit.
    sizes: the estimated memory of every candidate.
    """

    request: Request
    plans: tuple[Plan, ...]
    refused: tuple[Plan, ...]
    sizes: Mapping[Candidate, Memory]

    def as_dict(self) -> dict:
        """The JSON object. Bytes are of one device, seconds of one optimizer step."""
        request = self.request
        return {
            "model": request.name,
            "target": request.target.name,
            "residual": request.config.residual,
            "parameters": (count := models.parameters(request.config)).held,
            "parameters_active": count.active,
            "tokens": request.tokens,
            "sequence": request.sequence,
            "device_memory": request.target.memory,
            "considered": len(self.sizes),
            "plans": [_plan(plan, request) for plan in self.plans],
            "refused": [_plan(plan, request) for plan in self.refused],
        }

    def lines(self) -> list:
        """Lines and a table, for `terminal.show`."""
        request = self.request
        room = (
            ""
            if request.target.memory is None
            else f", {request.target.memory / GIB:.0f} GiB a device"
        )
        model = f"{request.name}, {request.config.residual}, {request.config.num_layers} layers"
        title = f"{model} on {request.target.name}{room};"
        if request.config.moe is not None:
            count = models.parameters(request.config)
            title += (
                f" {count.active / 1e9:.3g} of {count.held / 1e9:.3g} billion parameters active;"
            )
        title += f" {request.tokens:,} tokens a step, in sequences of {request.sequence:,}"
        if not self.plans:
            cure = "nothing fits: take more devices, shorter sequences or a smaller model"
            return [cure, f"reason    {_smallest(self)}", title, *_refused(self)]
        best = self.plans[0]
        overrides = " ".join(
            f"{name}={value}" for name, value in best.candidate.overrides(request).items()
        )
        return [
            f"take {best.candidate}",
            f"reason    {_why(self)}",
            title,
            _table(self),
            f"{len(self.plans)} of {len(self.sizes)} candidates fit: the fastest microbatch of up to {SHOWN} is shown",
            *_refused(self),
            "dxfxt: mesh.data x fsdp x tensor; rows: sequences in a microbatch of one batch shard, in turn: as two"
            " halves (train.interleave=2); accumulate: microbatches per step; GiB of a device: = from the compiler's"
            " memory_analysis of the whole training step, ~ estimated from shapes; the other columns are"
            " estimates (ladder_jax/plan/speed.py): MFU; waiting: share of time that transfers add; recomputed: FLOPs"
            " computed again, over the model's",
            *(
                ["note      a simulated device has no memory limit, and its speed here is nominal"]
                if not room
                else []
            ),
            "",
            f"ladder-jax train {_training(request.name)} {overrides}",
        ]


def ranked(sizes: Mapping[Candidate, Memory], *, request: Request) -> list[Plan]:
    """The candidates that fit, the fastest first; among equally fast ones, first those with less
    memory.
    """
    limit = request.target.memory
    plans = [
        Plan(one, size, speed.speed(one, size, request=request), limit)
        for one, size in sizes.items()
        if limit is None or size.device <= limit
    ]
    return sorted(plans, key=lambda plan: (round(plan.speed.seconds, 6), plan.memory.device))


def answer(request: Request, *, compiled: int) -> Answer:
    """The plans that fit. The target's compiler confirms the first `compiled` of them.

    If a compiled plan is too large, the next one is compiled. Raises UserError if the compiler is
    missing.
    """
    sizes = {one: memory.estimate(one, request=request) for one in candidates(request)}
    fitting = ranked(sizes, request=request)
    confirmed = []
    refused = []
    while fitting and len(confirmed) < compiled:
        plan = fitting.pop(0)
        plan = dataclasses.replace(plan, confirmed=confirm(plan.candidate, request=request))
        (confirmed if plan.fits else refused).append(plan)
        if len(refused) > MOST_REFUSED:
            break
    return Answer(request, (*confirmed, *fitting), tuple(refused), sizes)


def _plan(plan: Plan, request: Request) -> dict:
    candidate = plan.candidate
    return {
        "mesh": candidate.mesh.axes,
        "experts": candidate.mesh.experts.value,
        "remat": candidate.remat.value,
        "sequence_parallel": candidate.sequence_parallel,
        "microbatch": candidate.rows,
        "accumulate": candidate.accumulate,
        "interleave": candidate.interleave,
        "overrides": candidate.overrides(request),
        "fits": plan.fits,
        "bytes_estimated": plan.memory.device,
        "bytes_estimated_by_part": dataclasses.asdict(plan.memory),
        "bytes_per_device": None if plan.confirmed is None else plan.confirmed.device,
        "compiled": None if plan.confirmed is None else dataclasses.asdict(plan.confirmed),
        **dataclasses.asdict(plan.speed),
    }


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
    smallest, size = min(answer.sizes.items(), key=lambda pair: pair[1].device)
    return (
        f"of {len(answer.sizes)} candidates the smallest, {smallest}, is estimated at"
        f" {size.device / GIB:.1f} GiB of a device's {answer.request.target.memory / GIB:.0f}"
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
