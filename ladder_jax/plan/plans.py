"""Estimate every candidate's memory and speed, and rank the candidates that fit."""

import dataclasses

from ladder_jax.plan import memory, speed
from ladder_jax.plan.confirm import Confirmed, confirm
from ladder_jax.plan.memory import Memory
from ladder_jax.plan.request import Candidate, Request, candidates
from ladder_jax.plan.speed import Speed
from ladder_jax.schedule import shards

MOST_REFUSED = 4  # number of plans that the compiler refuses before confirmation stops


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


@dataclasses.dataclass(frozen=True)
class Answer:
    """The ranked plans of a request.

    plans: all that fit; the first one is recommended. refused: plans whose compiled step does not
        fit.
    considered: number of candidates. smallest: the candidate with the least estimated memory.
    """

    request: Request
    plans: tuple[Plan, ...]
    refused: tuple[Plan, ...]
    considered: int
    smallest: Plan

    def __repr__(self) -> str:
        best = f", the fastest {self.plans[0].candidate!r}" if self.plans else ""
        fitting = f"{len(self.plans)} of {self.considered} candidates fit"
        return f"Answer({self.request.name} on {self.request.target.name}: {fitting}{best})"


def ranked(request: Request) -> list[Plan]:
    """All candidates, the fastest first; among equally fast ones, first those with less memory."""
    limit = request.target.memory

    def plan(candidate: Candidate) -> Plan:
        estimates = (
            memory.estimate(candidate, request=request),
            speed.speed(candidate, request=request),
        )
        return Plan(candidate, *estimates, limit=limit)

    return sorted(
        map(plan, candidates(request)), key=lambda p: (round(p.speed.seconds, 6), p.memory.device)
    )


def answer(request: Request, *, compiled: int) -> Answer:
    """The plans that fit. The target's compiler confirms the first `compiled` of them.

    If a compiled plan is too large, the next one is compiled. Raises UserError if the compiler is
    missing.
    """
    every = ranked(request)
    fitting = [plan for plan in every if plan.limit is None or plan.memory.device <= plan.limit]
    confirmed = []
    refused = []
    while fitting and len(confirmed) < compiled:
        plan = fitting.pop(0)
        plan = dataclasses.replace(plan, confirmed=confirm(plan.candidate, request=request))
        (confirmed if plan.fits else refused).append(plan)
        if len(refused) > MOST_REFUSED:
            break
    smallest = min(every, key=lambda plan: plan.memory.device)
    return Answer(request, (*confirmed, *fitting), tuple(refused), len(every), smallest)


def as_dict(answer: Answer) -> dict:
    """The JSON object. Bytes are of one device, seconds of one optimizer step."""
    request = answer.request
    return {
        "model": request.name,
        "target": request.target.name,
        "residual": request.config.residual,
        "parameters": (count := shards.parameters(request.config)).held,
        "parameters_active": count.active,
        "tokens": request.tokens,
        "sequence": request.sequence,
        "device_memory": request.target.memory,
        "considered": answer.considered,
        "plans": [_plan(plan, request) for plan in answer.plans],
        "refused": [_plan(plan, request) for plan in answer.refused],
    }


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
