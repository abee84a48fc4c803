"""The answer of `ladder-jax predict`: a row a topology, and which one to take."""

import dataclasses

from ladder_jax.predict import advice, model
from ladder_jax.predict.advice import Advice
from ladder_jax.predict.model import Speed
from ladder_jax.predict.request import BASELINE, Request


@dataclasses.dataclass(frozen=True)
class Row:
    """speedup: tokens a second over Standard's."""

    residual: str
    speed: Speed
    speedup: float

    def as_dict(self, *, memory: float) -> dict:
        """Seconds of a whole generation; exposed: what its communication adds; of decode steps, the mean."""
        found = self.speed
        return {
            "residual": self.residual,
            "prefill_seconds": found.prefill_seconds,
            "decode_seconds": found.decode_seconds,
            "tokens_per_second": found.tokens_per_second,
            "exposed_seconds": found.exposed_seconds,
            "speedup": self.speedup,
            "step_seconds": found.step.seconds,
            "step_exposed_seconds": found.step.exposed,
            "prefill_exposed_seconds": found.prefill.exposed,
            "communication_seconds": found.wire_seconds,
            "hidden_fraction": {"prefill": found.prefill.hidden, "step": found.step.hidden},
            "memory_bytes": found.memory,
            "fits": found.memory <= memory,
        }


@dataclasses.dataclass(frozen=True)
class Result:
    request: Request
    rows: tuple[Row, ...]
    advice: Advice
    fidelity: str = "analytic"

    def as_dict(self) -> dict:
        """The JSON object: seconds and bytes are those of one device."""
        request = self.request
        return {
            "model": request.model,
            "hardware": request.machine.name,
            "tensor": request.tensor,
            "batch": request.batch,
            "prompt_length": request.prompt_length,
            "new_tokens": request.new_tokens,
            "ladder_layers": request.ladder_layers,
            "implementation": request.implementation.name,
            "fidelity": self.fidelity,
            "rows": [row.as_dict(memory=request.machine.memory) for row in self.rows],
            "recommendation": dataclasses.asdict(self.advice),
            "device_memory": request.machine.memory,
            "constants": constants(request),
        }


def predict(request: Request) -> Result:
    return of_speeds(request, {name: _speed(request, name) for name in {*request.residuals, BASELINE}})


def of_speeds(request: Request, speeds: dict[str, Speed], *, fidelity: str = "analytic") -> Result:
    """`speeds` of the request's residuals, and of Standard."""
    baseline = speeds[BASELINE].tokens_per_second
    rows = tuple(Row(name, speeds[name], speeds[name].tokens_per_second / baseline) for name in request.residuals)
    reading = advice.read(rows=rows, baseline=speeds[BASELINE], tensor=request.tensor)
    return Result(request, rows, reading, fidelity)


def constants(request: Request) -> dict[str, dict]:
    """The machine's constants by dotted name, and where each comes from."""
    machine, found = request.machine, {}
    sections = [("", machine)] + ([("link.", machine.link)] if machine.link else [])
    if machine.link and machine.link.network:
        sections.append(("link.network.", machine.link.network))
    for prefix, section in sections:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if isinstance(value, (int, float)):
                name = prefix + field.name
                found[name] = {"value": value, "source": machine.sources.get(name, "given without a source")}
    return found


def _speed(request: Request, residual: str) -> Speed:
    return model.speed(
        request.config(residual),
        machine=request.machine,
        tensor=request.tensor,
        rows=request.batch,
        prompt_length=request.prompt_length,
        new_tokens=request.new_tokens,
        implementation=request.implementation,
    )
