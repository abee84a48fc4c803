"""Confirm a plan's memory: compile its whole training step for the target, in a subprocess."""

import dataclasses
import hashlib
import json
import pathlib

from ladder_jax import files
from ladder_jax.config import to_dict
from ladder_jax.overlap import compile as compiling
from ladder_jax.plan.candidate import Candidate
from ladder_jax.plan.request import Request


@dataclasses.dataclass(frozen=True)
class Confirmed:
    """A training step's bytes on one device, by `memory_analysis()`. host: bytes of its host's memory.

    seconds: wall time of tracing and compiling. cpu_seconds: processor time of the compiling process.
    refusal: the compiler's message if it ran out of the device's memory (then all bytes are 0), or None.
    """

    arguments: int
    temporaries: int
    outputs: int
    code: int
    host: int
    seconds: float
    cpu_seconds: float
    jax: str
    compiler: str
    refusal: str | None = None

    @property
    def device(self) -> int:
        """Peak bytes: arguments, temporaries, code, and outputs that do not reuse an argument's memory."""
        return self.arguments + self.temporaries + self.outputs + self.code


def confirm(candidate: Candidate, *, request: Request) -> Confirmed:
    """The compiler's memory analysis, from the cache if possible. Raises UserError if the compiler is missing."""
    step = {
        "target": request.target.name,
        "model": to_dict(request.config),
        "mesh": to_dict(candidate.mesh),
        "train": to_dict(candidate.train(request)),
    }
    with files.cache("plans") as folder:
        path = folder / f"{_key(step)}.json"
        if (confirmed := _read(path)) is None:
            settings = _summary(candidate)
            label = f"{settings}, {request.config.num_layers} layers of {request.name} for {request.target.name}"
            compiling.run_worker("ladder_jax.plan.worker", step, path, target=request.target, label=label)
            confirmed = _read(path)
        return confirmed


def _summary(candidate: Candidate) -> str:
    sizes = " x ".join(str(size) for size in candidate.mesh.axes.values())
    exchanged = ", experts exchanged" if candidate.exchanges else ""
    exchanged += ", two halves in turn" if candidate.interleave == 2 else ""
    return f"mesh {sizes}{exchanged}, remat {candidate.remat.value}"


def _key(step: dict) -> str:
    digest = hashlib.sha256(json.dumps(step, sort_keys=True).encode())
    return compiling.with_sources(digest, (*compiling.SOURCES, *compiling.TRAINING, "plan/worker.py")).hexdigest()[:32]


def _read(path: pathlib.Path) -> Confirmed | None:
    try:
        return Confirmed(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
