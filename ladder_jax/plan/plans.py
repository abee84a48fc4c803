"""Candidates with what they take and how fast they are, in the order in which to try them."""

import dataclasses

from ladder_jax.plan import memory, speed
from ladder_jax.plan.candidate import Candidate, candidates
from ladder_jax.plan.confirm import Confirmed, confirm
from ladder_jax.plan.memory import Memory
from ladder_jax.plan.request import Request
from ladder_jax.plan.speed import Speed

MOST_REFUSED = 4  # programs that turn out too large before the rest is left as it is estimated


@dataclasses.dataclass(frozen=True)
class Plan:
    """limit: bytes of a device, None where it is not known (CPU); confirmed: None where nothing was compiled."""

    candidate: Candidate
    memory: Memory
    speed: Speed
    limit: int | None
    confirmed: Confirmed | None = None

    @property
    def bytes(self) -> int:
        """The compiler's, or the estimate."""
        return self.memory.device if self.confirmed is None else self.confirmed.device

    @property
    def fits(self) -> bool:
        if self.confirmed is not None and self.confirmed.refusal:
            return False
        return self.limit is None or self.bytes <= self.limit


@dataclasses.dataclass(frozen=True)
class Answer:
    """plans: those that fit, first the recommended one; refused: what the compiler found too large after all.

    considered: how many candidates there were; smallest: the one with the least memory, if none fits.
    """

    request: Request
    plans: tuple[Plan, ...]
    refused: tuple[Plan, ...]
    considered: int
    smallest: Plan


def ranked(request: Request) -> list[Plan]:
    """Every candidate, the fastest first; of one mesh, policy and stream, the largest microbatch last."""
    limit = request.target.memory

    def plan(candidate: Candidate) -> Plan:
        estimates = (memory.estimate(candidate, request=request), speed.speed(candidate, request=request))
        return Plan(candidate, *estimates, limit=limit)

    return sorted(map(plan, candidates(request)), key=lambda p: (round(p.speed.seconds, 6), p.memory.device))


def answer(request: Request, *, compiled: int) -> Answer:
    """The plans that fit; the first `compiled` of them are confirmed by the target's compiler.

    Where the compiler finds one too large, the next is tried. Raises UserError where it cannot compile for the target.
    """
    every = ranked(request)
    left = [plan for plan in every if plan.limit is None or plan.memory.device <= plan.limit]
    confirmed, refused = [], []
    while left and len(confirmed) < compiled:
        plan = left.pop(0)
        plan = dataclasses.replace(plan, confirmed=confirm(plan.candidate, request=request))
        (confirmed if plan.fits else refused).append(plan)
        if len(refused) > MOST_REFUSED:
            break
    smallest = min(every, key=lambda plan: plan.memory.device)
    return Answer(request, (*confirmed, *left), tuple(refused), len(every), smallest)


def as_dict(found: Answer) -> dict:
    """The JSON object. Bytes are those of one device; seconds of one optimizer step."""
    request = found.request
    return {
        "model": request.name,
        "target": request.target.name,
        "residual": request.config.residual,
        "tokens": request.tokens,
        "sequence": request.sequence,
        "device_memory": request.target.memory,
        "considered": found.considered,
        "plans": [_plan(plan, request) for plan in found.plans],
        "refused": [_plan(plan, request) for plan in found.refused],
    }


def _plan(plan: Plan, request: Request) -> dict:
    candidate = plan.candidate
    return {
        "mesh": dataclasses.asdict(candidate.mesh),
        "remat": candidate.remat.value,
        "sequence_parallel": candidate.sequence_parallel,
        "microbatch": candidate.rows,
        "accumulate": candidate.accumulate,
        "overrides": candidate.overrides(request),
        "fits": plan.fits,
        "bytes_estimated": plan.memory.device,
        "bytes_estimated_by_part": dataclasses.asdict(plan.memory),
        "bytes_per_device": None if plan.confirmed is None else plan.confirmed.device,
        "compiled": None if plan.confirmed is None else dataclasses.asdict(plan.confirmed),
        **dataclasses.asdict(plan.speed),
    }
