"""Confirm a plan's memory: compile its whole training step for the target, in a subprocess of this module.

python -m ladder_jax.plan.confirm REQUEST.json RESULT
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import sys
import time

from ladder_jax import files
from ladder_jax.config import RunConfig, from_dict, to_dict
from ladder_jax.errors import UserError
from ladder_jax.overlap import compile as compiling
from ladder_jax.plan.request import Candidate, Request
from ladder_jax.schedule import targets


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
            label = f"{candidate}; {request.config.num_layers} layers of {request.name} for {request.target.name}"
            compiling.run_worker("ladder_jax.plan.confirm", step, path, target=request.target, label=label)
            confirmed = _read(path)
        return confirmed


def _key(step: dict) -> str:
    digest = hashlib.sha256(json.dumps(step, sort_keys=True).encode())
    return compiling.with_sources(digest, (*compiling.SOURCES, *compiling.TRAINING, "plan/confirm.py")).hexdigest()[:32]


def _read(path: pathlib.Path) -> Confirmed | None:
    try:
        return Confirmed(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def main(source: str, destination: str) -> int:
    request = json.loads(pathlib.Path(source).read_text())
    config = from_dict({name: request[name] for name in ("model", "mesh", "train")})
    try:
        confirmed = measure(targets.parse(request["target"]), config=config)
    except UserError as error:
        print(json.dumps({"error": str(error)}))
        return 2
    files.write_atomically(destination, lambda path: pathlib.Path(path).write_text(json.dumps(confirmed)))
    return 0


def measure(target: targets.Target, *, config: RunConfig) -> dict:
    """Compile the step here. Returns the fields of `Confirmed`."""
    import jax

    from ladder_jax import nn, schedule, train
    from ladder_jax.overlap import programs
    from ladder_jax.parallel import make_mesh

    mesh = make_mesh(**config.mesh.axes, devices=schedule.devices(target))
    definition = nn.define(config.model, mesh=mesh, experts=config.mesh.experts)
    settings = dict(config=config.train)
    arguments = train.abstract_state(definition, **settings), train.abstract_batch(definition, **settings)
    versions = {"jax": jax.__version__, "compiler": programs.compiler(target)}
    started = time.perf_counter()
    cpu_started = time.process_time()
    elapsed = lambda: {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
    try:
        memory = train.train_step(definition, **settings).compile(*arguments).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        none = dict.fromkeys(("arguments", "temporaries", "outputs", "code", "host"), 0)
        refusal = str(error).splitlines()[0][:400]
        return {**none, **elapsed(), **versions, "refusal": refusal}
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "host": memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes,
        **elapsed(),
        **versions,
    }


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no normal exit: a compiler's threads may hang at the interpreter's end
