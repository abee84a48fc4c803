"""The checked arguments of `ladder-jax predict`, with defaults."""

import dataclasses
import re

from ladder_jax.config import (
    EXPERT_RESIDUALS,
    RESIDUALS,
    ExpertParallelism,
    Launch,
    ModelConfig,
    MoEConfig,
    Phase,
    check_exchange,
    check_halves,
    parse_residual,
)
from ladder_jax.errors import UserError, member, unknown
from ladder_jax.overlap.request import exchange_capacity
from ladder_jax.predict import machine as machines
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.work import IMPLEMENTATIONS, OURS, Implementation
from ladder_jax.schedule import models
from ladder_jax.splits import check_divides, divisors
from ladder_jax.words import positive, words

BASELINE = "standard"
AUTO = "auto"
INTERLEAVES = {"1": (1,), "2": (2,), AUTO: (1, 2)}  # of prefill and training; a topology without halves has the whole
GENERATE = "generate"
PHASES = (GENERATE, Phase.PREFILL.value, Phase.TRAIN.value)
EXCHANGE = dict(sequence_parallel=True, names=("--experts exchange", "--capacity", ""))  # of `check_exchange`
OF_PHASES = {"prompt_length": PHASES[:2], "new_tokens": PHASES[:1], "sequence": PHASES[2:]}  # options, by name


@dataclasses.dataclass(frozen=True)
class Request:
    """model: as the user typed it; shape: its configuration. residuals: in the order of the result's rows.
    ladder_layers: makes hybrids of the ladder kinds among them.

    phase: PREFILL or TRAIN; None for a whole generation. sequence: tokens a row in training. launches: among which
    topologies that hide their all-reduces take the fastest. interleaves: likewise the whole batch (1) and two halves in
    turn (2), of prefill and training. experts, capacity: as in `overlap.request.Request`, of the rows; Standard's
    opponents have both forms wherever the model has a capacity.
    """

    model: str
    shape: ModelConfig
    machine: Machine
    tensor: int
    batch: int
    prompt_length: int = 1024
    new_tokens: int = 512
    residuals: tuple[str, ...] = RESIDUALS
    ladder_layers: str | None = None
    layers: int | None = None
    implementation: Implementation = OURS
    phase: Phase | None = None
    sequence: int = 2048
    launches: tuple[Launch, ...] = tuple(Launch)
    interleaves: tuple[int, ...] = (1, 2)
    experts: ExpertParallelism = ExpertParallelism.REDUCE
    capacity: float | None = None

    @property
    def forms(self) -> tuple[ExpertParallelism, ...]:
        """Those in which Standard can compute the model. One without a capacity drops no row, as an exchange may."""
        moe = self.config(BASELINE).moe
        if moe is None or moe.capacity is None or moe.dense_layers or self.tensor == 1 or self.tokens % self.tensor:
            return (ExpertParallelism.REDUCE,)
        return tuple(ExpertParallelism)

    @property
    def tokens(self) -> int:
        """Tokens a row of a prefill or a training step."""
        return self.sequence if self.phase is Phase.TRAIN else self.prompt_length

    def config(self, residual: str) -> ModelConfig:
        """The model's configuration with one of the residuals."""
        name, moe = parse_residual(residual), self.shape.moe
        return dataclasses.replace(
            self.shape,
            moe=moe if self.capacity is None else dataclasses.replace(moe, capacity=self.capacity),
            num_layers=self.layers or self.shape.num_layers,
            residual=residual,
            ladder_layers=self.ladder_layers if name.is_ladder else None,
            ranks=self.tensor if name.depends_on_ranks else None,
        )


def make(
    *,
    model: str,
    hardware: str,
    tensor: int | None = None,
    batch: int | None = None,
    prompt_length: int | None = None,
    new_tokens: int | None = None,
    residual: str | None = None,
    ladder_layers: str | None = None,
    layers: int | None = None,
    implementation: str | None = None,
    phase: str | None = None,
    sequence: int | None = None,
    launch: str | None = None,
    interleave: str | None = None,
    experts: str | None = None,
    capacity: float | None = None,
) -> Request:
    """A checked request. None gives a default: all devices, one row, all residuals. Raises UserError."""
    shape = models.by_name(model)
    models.check_alone(shape, verb="predict")
    machine = machines.load(hardware)
    numbers = dict(tensor=tensor, batch=batch, prompt_length=prompt_length, new_tokens=new_tokens, layers=layers)
    numbers["sequence"] = sequence
    phase = GENERATE if phase is None else phase
    if phase not in PHASES:
        raise unknown("phase", phase, PHASES)
    for name, phases in OF_PHASES.items():
        if numbers[name] is not None and phase not in phases:
            raise UserError(f"--{name.replace('_', '-')} belongs to --phase {' and '.join(phases)}, not {phase}")
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be positive, not {value}")
    if new_tokens == 1:
        raise UserError("--new-tokens must be at least 2, not 1: the first one is the prefill's")
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise unknown("implementation", implementation, IMPLEMENTATIONS)
    if implementation not in (None, "ours") and shape.moe is not None:
        raise UserError(f"--implementation {implementation} has no experts (model.moe): it must be ours")
    settings = {name: value for name, value in numbers.items() if value is not None}
    settings["residuals"] = words("residual", residual) if residual is not None else _possible(shape)
    if launch is not None and member(Launch, "launch", launch) is not Launch.AUTO:
        settings["launches"] = (Launch(launch),)
    if interleave not in (None, *INTERLEAVES):
        raise UserError(f"--interleave must be one of {', '.join(INTERLEAVES)}, not {interleave!r}")
    settings["interleaves"] = INTERLEAVES[interleave or AUTO]
    if phase != GENERATE:
        settings["phase"] = Phase(phase)
    if phase == Phase.TRAIN.value:
        chosen = None if residual is None else settings["residuals"]
        settings["residuals"] = _trainable(chosen, implementation, shape)
    form = member(ExpertParallelism, "--experts", experts or ExpertParallelism.REDUCE.value)
    settings["capacity"] = exchange_capacity(capacity, config=shape, experts=form)
    if form is ExpertParallelism.EXCHANGE and residual is None and shape.moe is not None:
        settings["residuals"] = _exchanging(settings["residuals"], shape.moe)
    request = Request(
        model=model,
        shape=shape,
        machine=machine,
        ladder_layers=ladder_layers,
        implementation=IMPLEMENTATIONS[implementation or "ours"],
        experts=form,
        **{"tensor": machine.devices, "batch": 1, **settings},
    )
    check_tensor(request)
    for name in request.residuals:
        request.config(name)
    if form is ExpertParallelism.EXCHANGE:
        _check_exchange(request)
    if interleave == "2" and residual is not None:
        for name in request.residuals:
            one = dict(model=request.config(name), rows=2, names=("--interleave", "--batch"), experts=form)
            check_halves(2, **one)
    if ladder_layers is not None and not any(parse_residual(name).is_ladder for name in request.residuals):
        raise UserError(f"--ladder-layers needs a ladder kind of residual, not {', '.join(request.residuals)}")
    return request


def _possible(shape: ModelConfig) -> tuple[str, ...]:
    """Of a model with experts, those that give all ranks the same input; with a shared one, farskip too."""
    if shape.moe is None:
        return RESIDUALS
    more = EXPERT_RESIDUALS if shape.moe.shared_width else ()
    return (*(name for name in RESIDUALS if not parse_residual(name).depends_on_ranks), *more)


def _trainable(residuals: tuple[str, ...] | None, implementation: str | None, shape: ModelConfig) -> tuple[str, ...]:
    """The residuals whose training step can be predicted: all but desync."""
    if implementation not in (None, "ours"):
        raise UserError("--phase train predicts this library's training step: --implementation must be ours")
    possible = tuple(name for name in _possible(shape) if parse_residual(name).kind != "desync")
    for name in residuals or ():
        if parse_residual(name).kind == "desync":
            raise UserError(f"--phase train has no prediction of {name}'s backward pass")
    return residuals or possible


def _exchanging(residuals: tuple[str, ...], moe: MoEConfig) -> tuple[str, ...]:
    """Those whose experts can be exchanged; all if none can, for the reason that the check of each gives."""

    def can(residual: str) -> bool:
        try:
            check_exchange(dataclasses.replace(moe, capacity=1.0), residual=residual, **EXCHANGE)
        except UserError:
            return False
        return True

    return tuple(filter(can, residuals)) or residuals


def _check_exchange(request: Request) -> None:
    """Raises UserError for a request whose experts' rows cannot be exchanged."""
    for name in request.residuals:
        check_exchange(request.config(BASELINE).moe, residual=name, **EXCHANGE)
    if request.phase is None:
        decoding = "decoding always reduces the experts' sums"
        raise UserError(f"--experts exchange is for --phase prefill and train, not {GENERATE}: {decoding}")
    if request.tensor == 1:
        raise UserError("--experts exchange sends rows to other ranks: --tensor must be at least 2, not 1")
    if request.tokens % request.tensor:
        length = "--sequence" if request.phase is Phase.TRAIN else "--prompt-length"
        raise UserError(f"--experts exchange splits {length} {request.tokens} over --tensor {request.tensor}")


def check_tensor(request: Request) -> None:
    """Raises UserError if the machine has fewer devices, or if the model cannot be split over so many."""
    most = request.machine.devices
    if request.tensor > most:
        allowed = ", ".join(map(str, divisors(request.shape, most=most)))
        raise UserError(
            f"--tensor {request.tensor} is more than the {most} devices of {request.machine.name}"
            f" (allowed for {request.model}: {allowed})"
        )
    check_divides(request.shape, tensor=request.tensor, most=most)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The values to vary.

    link: factors of the machine's link speed. unsplit: tensor sizes that do not divide the model.
    """

    tensor: tuple[int, ...]
    batch: tuple[int, ...]
    link: tuple[float, ...]
    unsplit: tuple[int, ...] = ()


def sweep(request: Request, phrases: list[str]) -> Sweep:
    """Parse phrases such as `tensor=1,2,4,8`. An axis without a phrase has the request's value."""
    values: dict[str, tuple] = {"tensor": (request.tensor,), "batch": (request.batch,), "link": (1.0,)}
    for phrase in phrases:
        name, equals, text = phrase.partition("=")
        if name not in values:
            raise unknown("axis of --sweep", name, values)
        if not equals:
            raise UserError(f"--sweep {phrase!r} has no values: write it as in {name}=1,2,4")
        parse = _speed if name == "link" else lambda word: positive(f"sweep {name}", word)
        values[name] = tuple(parse(word) for word in words("sweep", text))
    for tensor in values["tensor"]:
        if tensor > request.machine.devices:
            check_tensor(dataclasses.replace(request, tensor=tensor))
    divisible = set(divisors(request.shape, most=max(values["tensor"])))
    fits = tuple(size for size in values["tensor"] if size in divisible)
    if not fits:
        check_tensor(dataclasses.replace(request, tensor=values["tensor"][0]))
    unsplit = tuple(size for size in values["tensor"] if size not in divisible)
    return Sweep(fits, values["batch"], values["link"], unsplit)


def _speed(word: str) -> float:
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", word) or float(word) == 0:
        raise UserError(f"--sweep link must be factors above 0 as in 0.25,1,4, not {word!r}")
    return float(word)
