"""The verb `plan`: estimate every candidate's memory and speed, rank the candidates that fit, print
the plans.
"""

import dataclasses
import functools
from collections.abc import Sequence

from ladder_jax import terminal
from ladder_jax.config import PRESETS, is_file
from ladder_jax.errors import UserError
from ladder_jax.plan import memory, request as requests, speed
from ladder_jax.plan.confirm import Confirmed, confirm
from ladder_jax.plan.memory import Memory
from ladder_jax.plan.request import Candidate, Request, candidates
from ladder_jax.plan.speed import Speed
from ladder_jax.schedule import models
from ladder_jax.terminal import Table, number

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
    """confirmed: None if the plan was not compiled."""

    candidate: Candidate
    confirmed: Confirmed | None = None

    @functools.cached_property
    def memory(self) -> Memory:
        return memory.estimate(self.candidate)

    @functools.cached_property
    def speed(self) -> Speed:
        return speed.speed(self.candidate, self.memory)

    @property
    def bytes(self) -> int:
        """The compiler's figure if the plan was compiled, or else the estimate."""
        return self.memory.device if self.confirmed is None else self.confirmed.device

    @property
    def fits(self) -> bool:
        if self.confirmed is not None and self.confirmed.refusal:
            return False
        limit = self.candidate.request.target.memory  # None of a CPU
        return limit is None or self.bytes <= limit

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row in the table of plans."""
        speed = self.speed
        return (
            *self.candidate.cells,
            f"{'~' if self.confirmed is None else '='}{self.bytes / GIB:.1f}",
            number(speed.seconds),
            f"{speed.mfu:.0%}",
            f"{speed.exposed / speed.seconds:.0%}",
            f"{speed.recomputed:.0%}",
        )

    def as_dict(self) -> dict:
        candidate = self.candidate
        confirmed = self.confirmed
        return {
            "mesh": candidate.mesh.axes,
            "experts": candidate.mesh.experts.value,
            "remat": candidate.remat.value,
            "sequence_parallel": candidate.sequence_parallel,
            "microbatch": candidate.rows,
            "accumulate": candidate.accumulate,
            "interleave": candidate.interleave,
            "overrides": candidate.overrides,
            "fits": self.fits,
            "bytes_estimated": self.memory.device,
            "bytes_estimated_by_part": dataclasses.asdict(self.memory),
            "bytes_per_device": confirmed and confirmed.device,
            "compiled": confirmed and dataclasses.asdict(confirmed),
            **dataclasses.asdict(self.speed),
        }


@dataclasses.dataclass(frozen=True, repr=False)
class Answer:
    """The ranked plans of a request.

    plans: all that fit; the first one is recommended. refused: plans whose compiled step does not
        fit.
    considered: a plan of every candidate.
    """

    request: Request
    plans: tuple[Plan, ...]
    refused: tuple[Plan, ...]
    considered: Sequence[Plan]

    def as_dict(self) -> dict:
        """The JSON object. Bytes are of one device, seconds of one optimizer step."""
        request = self.request
        return {
            "model": request.name,
            "target": request.target.name,
            "residual": request.config.residual,
            **models.parameters(request.config),
            "tokens": request.tokens,
            "sequence": request.sequence,
            "device_memory": request.target.memory,
            "considered": len(self.considered),
            "plans": [plan.as_dict() for plan in self.plans],
            "refused": [plan.as_dict() for plan in self.refused],
        }

    def lines(self) -> list:
        """Lines and a table, for `terminal.show`."""
        request = self.request
        target = request.target
        limit = target.memory
        room = "" if limit is None else f", {limit / GIB:.0f} GiB a device"
        model = f"{request.name}, {request.config.residual}, {request.config.num_layers} layers"
        tokens = f"{request.tokens:,} tokens a step, in sequences of {request.sequence:,}"
        title = f"{model} on {target.name}{room}; {tokens}"
        refused = []
        for plan in self.refused:
            reason = plan.confirmed.refusal or f"{plan.bytes / GIB:.1f} GiB compiled"
            estimated = plan.memory.device / GIB
            refused.append(f"too large: {plan.candidate}: {reason} (estimated {estimated:.1f})")
        if not self.plans:
            least = min(plan.bytes for plan in self.considered)
            return [
                "nothing fits: take more devices, shorter sequences or a smaller model",
                f"reason    of {len(self.considered)} candidates the smallest is estimated at {least / GIB:.1f} GiB",
                title,
                *refused,
            ]
        best = self.plans[0]
        size = f"{best.bytes / GIB:.1f} GiB, {'compiled' if best.confirmed else 'estimated'}"
        overrides = best.candidate.overrides
        changes = " ".join(f"{name}={value}" for name, value in overrides.items())
        nominal = "note      a simulated device has no memory limit, and its speed here is nominal"
        return [
            f"take {best.candidate}",
            f"reason    it fits ({size}), and has the fastest estimate: {number(best.speed.seconds)} s a step",
            title,
            Table(COLUMNS, [plan.cells for plan in _shown(self.plans)], left=COLUMNS[:3]),
            f"{len(self.plans)} of {len(self.considered)} candidates fit: the fastest microbatch of up to {SHOWN} is"
            " shown",
            *refused,
            "dxfxt: mesh.data x fsdp x tensor; rows: sequences in a microbatch of one batch shard, in turn: as two"
            " halves (train.interleave=2); accumulate: microbatches per step; GiB of a device: = from the compiler's"
            " memory_analysis of the whole training step, ~ estimated from shapes; the other columns are"
            " estimates (ladder_jax/plan/speed.py): MFU; waiting: share of time that transfers add; recomputed: FLOPs"
            " computed again, over the model's",
            *([nominal] if limit is None else []),
            "",
            f"ladder-jax train {_training(request.name)} {changes}",
        ]


def answer(request: Request, *, compiled: int) -> Answer:
    """The plans that fit. The target's compiler confirms the first `compiled` of them.

    If a compiled plan is too large, the next one is compiled. Raises UserError if the compiler is
    missing.
    """
    considered = [Plan(one) for one in candidates(request)]
    # among equally fast ones, first those with less memory
    pace = lambda plan: (round(plan.speed.seconds, 6), plan.bytes)
    fitting = sorted((plan for plan in considered if plan.fits), key=pace)
    confirmed = []
    refused = []
    while fitting and len(confirmed) < compiled:
        plan = fitting.pop(0)
        plan = Plan(plan.candidate, confirm(plan.candidate))
        (confirmed if plan.fits else refused).append(plan)
        if len(refused) > MOST_REFUSED:
            break
    return Answer(request, (*confirmed, *fitting), tuple(refused), considered)


def _training(name: str) -> str:
    """What `train` takes for the model: a preset or a file as it is, another model as the weights
    to begin with.
    """
    return name if name in PRESETS or is_file(name) else f"RECIPE.yaml train.start={name}"


def _shown(plans: Sequence[Plan]) -> list[Plan]:
    """All compiled plans, and of plans that differ only in the microbatch and its halves the first;
    at most SHOWN.
    """
    seen = set()
    shown = []
    for plan in plans:
        key = plan.candidate.mesh, plan.candidate.remat, plan.candidate.sequence_parallel
        if plan.confirmed is not None or key not in seen:
            shown.append(plan)
        seen.add(key)
    return shown[:SHOWN]
