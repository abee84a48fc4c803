"""What the target's compiler says that a plan takes: the whole training step, compiled in a process of its own."""

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
    """Bytes of one device, by `memory_analysis()`; `host`: of its host's memory.

    seconds: that tracing and compiling took; cpu_seconds: of all processors together, whatever else they do.
    refusal: the compiler's words where it gave up, as for want of memory; the bytes are then 0.
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
        """At the peak: arguments, temporaries, code, and outputs that do not reuse an argument's memory."""
        return self.arguments + self.temporaries + self.outputs + self.code


def confirm(candidate: Candidate, *, request: Request) -> Confirmed:
    """Raises UserError where the target cannot be compiled for here."""
    asked = {
        "target": request.target.name,
        "model": to_dict(request.config),
        "mesh": to_dict(candidate.mesh),
        "train": to_dict(candidate.train(request)),
    }
    with files.cache("plans") as folder:
        path = folder / f"{_key(asked)}.json"
        if (found := _read(path)) is None:
            mesh = _in_words(candidate)
            label = f"{mesh}, {request.config.num_layers} layers of {request.name} for {request.target.name}"
            compiling.run_worker("ladder_jax.plan.worker", asked, path, target=request.target, label=label)
            found = _read(path)
        return found


def _in_words(candidate: Candidate) -> str:
    sizes = " x ".join(str(size) for size in dataclasses.astuple(candidate.mesh))
    return f"mesh {sizes}, remat {candidate.remat.value}"


def _key(asked: dict) -> str:
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    return compiling.with_sources(digest, (*compiling.SOURCES, *compiling.TRAINING, "plan/worker.py")).hexdigest()[:32]


def _read(path: pathlib.Path) -> Confirmed | None:
    try:
        return Confirmed(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
