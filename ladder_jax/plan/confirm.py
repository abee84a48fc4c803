"""Confirm a plan's memory: compile its whole training step for the target, in a process of its
own.
"""

import dataclasses
import time

from ladder_jax.config import from_dict, to_dict
from ladder_jax.overlap import compile as compiling
from ladder_jax.plan.request import Candidate
from ladder_jax.schedule import targets


@dataclasses.dataclass(frozen=True)
class Confirmed:
    """A training step's bytes on one device, by `memory_analysis()`. host: bytes of its host's
    memory.

    seconds: wall time of tracing and compiling. cpu_seconds: processor time of the compiling
        process.
    refusal: the compiler's message if it ran out of the device's memory (then all bytes are 0), or
        None.
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
        """Peak bytes: arguments, temporaries, code, and outputs that do not reuse an argument's
        memory.
        """
        return self.arguments + self.temporaries + self.outputs + self.code


def confirm(candidate: Candidate) -> Confirmed:
    """The compiler's memory analysis, from the cache if possible. Raises UserError if the compiler
    is missing.
    """
    request = candidate.request
    step = {"target": request.target.name, "run": to_dict(candidate.run())}
    return compiling.recorded(
        Confirmed, "ladder_jax.plan.confirm:measure", step, target=request.target
    )


def measure(step: dict) -> Confirmed:
    """Compile the step here."""
    import jax

    from ladder_jax import nn, schedule
    from ladder_jax.overlap import programs
    from ladder_jax.parallel import make_mesh

    target = targets.parse(step["target"])
    config = from_dict(step["run"])
    mesh = make_mesh(**config.mesh.axes, devices=schedule.devices(target))
    definition = nn.define(config.model, mesh=mesh, experts=config.mesh.experts)
    function, arguments = programs.training(definition, config=config.train)
    started = time.perf_counter()
    cpu_started = time.process_time()
    refusal = None
    sizes = dict.fromkeys(("arguments", "temporaries", "outputs", "code", "host"), 0)
    try:
        compiled = function.compile(*arguments)
        memory = compiled.memory_analysis()
        sizes = programs.sizes(compiled)
        sizes["host"] = memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        refusal = str(error).splitlines()[0][:400]
    return Confirmed(
        **sizes,
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu_started,
        jax=jax.__version__,
        compiler=programs.compiler(target),
        refusal=refusal,
    )
