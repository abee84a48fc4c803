"""The result of `ladder-jax predict`: a row per topology, the fastest Standard, and a recommendation."""

import dataclasses

from ladder_jax.config import Phase
from ladder_jax.predict import advice, model
from ladder_jax.predict.advice import Advice, Opponent
from ladder_jax.predict.link import Kernel, Network
from ladder_jax.predict.model import Pass, Speed
from ladder_jax.predict.program import Form, Opponents, decoding_in_halves
from ladder_jax.predict.request import BASELINE, Request
from ladder_jax.predict.work import Model


@dataclasses.dataclass(frozen=True)
class Row:
    """speedup: tokens a second over those of the baseline. speedup_over_nccl: over those of Standard with NCCL."""

    residual: str
    speed: Speed
    speedup: float
    speedup_over_nccl: float

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
            "speedup_over_nccl": self.speedup_over_nccl,
            **executed(speed.step),
            "step_seconds": speed.step.seconds,
            "step_exposed_seconds": speed.step.exposed,
            "prefill_exposed_seconds": speed.prefill.exposed,
            "communication_seconds": speed.wire_seconds,
            "hidden_fraction": {"prefill": speed.prefill.hidden, "step": speed.step.hidden},
            "interleave": interleave(speed),
            "memory_bytes": speed.memory,
            "fits": speed.memory <= memory,
        }


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The fastest way without changing the model. form: of prefill and decode step, or of the one phase in question.

    interleave: 2 for two halves in turn; of prefill and decode step, or of the one phase.
    """

    form: str
    all_reduce: str | None
    tokens_per_second: float
    interleave: int | dict[str, int] = 1
    residual: str = BASELINE

    @property
    def name(self) -> str:
        return f"Standard ({described(self.form, self.all_reduce)}{in_turn(self.interleave)})"

    def as_dict(self) -> dict:
        return {
            "residual": self.residual,
            "form": self.form,
            "interleave": self.interleave,
            "all_reduce": self.all_reduce,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclasses.dataclass(frozen=True)
class Result:
    request: Request
    rows: tuple[Row, ...]
    baseline: Baseline
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
            "baseline": self.baseline.as_dict(),
            "recommendation": dataclasses.asdict(self.advice),
            "device_memory": request.machine.memory,
            "constants": constants(request),
        }


def predict(request: Request, *, opponents: Opponents = Opponents.STRONGEST) -> Result:
    speeds = {name: _speed(request, name, opponents) for name in {*request.residuals, BASELINE}}
    return of_speeds(request, speeds, nccl=_speed(request, BASELINE, Opponents.NCCL))


ANALYTIC = "analytic"


def of_speeds(request: Request, speeds: dict[str, Speed], *, nccl: Speed, fidelity: str = ANALYTIC) -> Result:
    """The result. speeds: of the request's residuals and of Standard. nccl: of Standard with NCCL's all-reduces."""
    fastest = opponent_of(request, speeds[BASELINE]) if fidelity == ANALYTIC else speeds[BASELINE]
    forms = dict.fromkeys((fastest.step.program.form, fastest.prefill.program.form))
    form = Form.ALL_REDUCE.value if len(forms) == 1 else f"all-reduce; prefill: {fastest.prefill.program.form.value}"
    baseline = Baseline(form, algorithm(fastest.step), fastest.tokens_per_second, interleave(fastest))
    over = lambda name, other: speeds[name].tokens_per_second / other.tokens_per_second
    rows = tuple(Row(name, speeds[name], over(name, fastest), over(name, nccl)) for name in request.residuals)
    share = fastest.exposed_seconds / (fastest.prefill_seconds + fastest.decode_seconds)
    opponent = Opponent(baseline.name, share, advice.lengths(fastest))
    recommendation = advice.read(rows=rows, opponent=opponent, tensor=request.tensor)
    return Result(request, rows, baseline, recommendation, fidelity)


def opponent_of(request: Request, standard: Speed) -> Speed:
    """Standard at its fastest: of other frameworks also with a decode step in two halves."""
    ours = Model(request.config(BASELINE), request.tensor, request.implementation)
    shape = dict(rows=request.batch, prompt_length=request.prompt_length, new_tokens=request.new_tokens)
    programs = decoding_in_halves(rows=request.batch, ranks=request.tensor, implementation=request.implementation)
    halves = [
        model.run_by(ours, request.machine, ours.decode_step(**shape), program, phase=Phase.DECODE)
        for program in programs
    ]
    return dataclasses.replace(standard, step=model.fastest([standard.step, *halves]))


def interleave(speed: Speed) -> dict[str, int]:
    """In how many parts in turn prefill and decode step compute, as JSON."""
    return {"prefill": speed.prefill.program.interleave, "step": speed.step.program.interleave}


def in_turn(interleave: int | dict[str, int]) -> str:
    """Halves in words, after a form."""
    if isinstance(interleave, int):
        return ", two halves in turn" if interleave == 2 else ""
    halved = [phase for phase, parts in interleave.items() if parts == 2]
    return f", {' and '.join(halved)} in two halves" if halved else ""


def executed(found: Pass) -> dict[str, str | None]:
    """How a pass communicates, as JSON."""
    launch = found.program.launch
    return {"all_reduce": algorithm(found), "launch": launch.value if launch and found.wire else None}


def algorithm(found: Pass) -> str | None:
    return found.all_reduce.value if found.all_reduce else None


def described(form: str, all_reduce: str | None) -> str:
    """A form in words, with the algorithm of its all-reduces."""
    if all_reduce is None or not form.startswith(Form.ALL_REDUCE.value):
        return form
    return f"{all_reduce} {form}"


def constants(request: Request) -> dict[str, dict]:
    """The machine's constants by dotted name, each with its source."""
    machine, constants = request.machine, {}
    sections = [("", machine)]
    if machine.link:
        fields = {field.name: getattr(machine.link, field.name) for field in dataclasses.fields(machine.link)}
        inner = [(f"link.{name}.", value) for name, value in fields.items() if isinstance(value, (Network, Kernel))]
        sections += [("link.", machine.link), *inner]
    for prefix, section in sections:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if isinstance(value, (int, float)):
                name = prefix + field.name
                constants[name] = {"value": value, "source": machine.sources.get(name, "given without a source")}
    return constants


def _speed(request: Request, residual: str, opponents: Opponents) -> Speed:
    return model.speed(
        request.config(residual),
        machine=request.machine,
        tensor=request.tensor,
        rows=request.batch,
        prompt_length=request.prompt_length,
        new_tokens=request.new_tokens,
        implementation=request.implementation,
        opponents=opponents,
        launches=request.launches,
        interleaves=request.interleaves,
    )
