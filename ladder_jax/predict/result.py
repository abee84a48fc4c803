"""The result of `ladder-jax predict`: a row per topology, and a recommendation."""

import dataclasses

from ladder_jax.predict import advice, model
from ladder_jax.predict.advice import Advice
from ladder_jax.predict.model import Speed
from ladder_jax.predict.request import BASELINE, Request


@dataclasses.dataclass(frozen=True)
class Row:
    """speedup: tokens a second over those of Standard."""

    residual: str
    speed: Speed
    speedup: float

    def __repr__(self) -> str:
        speed = f"{self.speed.tokens_per_second:,.4g} tokens/s, {self.speedup:.2f} x Standard"
        return f"Row({self.residual}: {speed})"

    def as_dict(self, *, memory: float) -> dict:
        """The JSON row: seconds of a whole generation, and of its mean decode step. exposed: added by communication."""
        speed = self.speed
        return {
            "residual": self.residual,
            "prefill_seconds": speed.prefill_seconds,
            "decode_seconds": speed.decode_seconds,
            "tokens_per_second": speed.tokens_per_second,
            "exposed_seconds": speed.exposed_seconds,
            "speedup": self.speedup,
            "step_seconds": speed.step.seconds,
            "step_exposed_seconds": speed.step.exposed,
            "prefill_exposed_seconds": speed.prefill.exposed,
            "communication_seconds": speed.wire_seconds,
            "hidden_fraction": {"prefill": speed.prefill.hidden, "step": speed.step.hidden},
            "memory_bytes": speed.memory,
            "fits": speed.memory <= memory,
        }


@dataclasses.dataclass(frozen=True)
class Result:
    request: Request
    rows: tuple[Row, ...]
    advice: Advice
    fidelity: str = "analytic"

    def __repr__(self) -> str:
        request = self.request
        title = f"{request.model}, tensor {request.tensor}, batch {request.batch} on {request.machine.name}"
        return "\n  ".join([f"Result({title}): take {self.advice.residual}", *map(repr, self.rows)])

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
    """The result. speeds: of the request's residuals and of Standard."""
    baseline = speeds[BASELINE].tokens_per_second
    rows = tuple(Row(name, speeds[name], speeds[name].tokens_per_second / baseline) for name in request.residuals)
    recommendation = advice.read(rows=rows, baseline=speeds[BASELINE], tensor=request.tensor)
    return Result(request, rows, recommendation, fidelity)


def constants(request: Request) -> dict[str, dict]:
    """The machine's constants by dotted name, each with its source."""
    machine, constants = request.machine, {}
    sections = [("", machine)] + ([("link.", machine.link)] if machine.link else [])
    if machine.link and machine.link.network:
        sections.append(("link.network.", machine.link.network))
    for prefix, section in sections:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if isinstance(value, (int, float)):
                name = prefix + field.name
                constants[name] = {"value": value, "source": machine.sources.get(name, "given without a source")}
    return constants


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
