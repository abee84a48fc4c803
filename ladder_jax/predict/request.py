"""The checked arguments of `ladder-jax predict`, with defaults."""

import dataclasses

from ladder_jax.config import (
    EXPERT_RESIDUALS,
    RESIDUALS,
    ExpertParallelism,
    Launch,
    ModelConfig,
    Phase,
    check_exchange,
    check_halves,
    parse_residual,
)
from ladder_jax.config.fields import check
from ladder_jax.errors import UserError, member, unknown
from ladder_jax.overlap.request import exchange_capacity
from ladder_jax.predict import machine as machines
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.work import IMPLEMENTATIONS, OURS, Implementation
from ladder_jax.schedule import models
from ladder_jax.splits import check_divides, divisors
from ladder_jax.words import words

BASELINE = "standard"
AUTO = "auto"
INTERLEAVES = {"1": (1,), "2": (2,), AUTO: (1, 2)}  # of prefill and training; a topology without halves has the whole
GENERATE = "generate"
PHASES = (GENERATE, Phase.PREFILL.value, Phase.TRAIN.value)
EXCHANGE = dict(sequence_parallel=True, names=("--experts exchange", "--capacity", ""))  # of `check_exchange`
NUMBERS = ("tensor", "batch", "prompt_length", "new_tokens", "layers", "sequence")
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
        name = parse_residual(residual)
        moe = self.shape.moe
        return dataclasses.replace(
            self.shape,
            moe=moe if self.capacity is None else dataclasses.replace(moe, capacity=self.capacity),
            num_layers=self.layers or self.shape.num_layers,
            residual=residual,
            ladder_layers=self.ladder_layers if name.is_ladder else None,
            ranks=self.tensor if name.depends_on_ranks else None,
        )


def make(*, model: str, hardware: str, **options: object) -> Request:
    """A checked request. Raises UserError.

    options: those of `ladder-jax predict`, by name: numbers, `residual` (a list in words), `ladder_layers`,
    `implementation`, `phase`, `launch`, `interleave`, `experts` and `capacity`. None gives a default: all devices, one
    row, all residuals.
    """
    given = {name: value for name, value in options.items() if value is not None}
    shape = models.by_name(model)
    machine = machines.load(hardware)
    models.check_alone(shape, verb="predict")
    phase = given.pop("phase", GENERATE)
    if phase not in PHASES:
        raise unknown("phase", phase, PHASES)
    for name, phases in OF_PHASES.items():
        belongs = f"{_option(name)} belongs to --phase {' and '.join(phases)}, not {phase}"
        check(name not in given or phase in phases, belongs)
    for name in NUMBERS:
        check(given.get(name, 1) >= 1, f"{_option(name)} must be positive, not {given.get(name)}")
    check(given.get("new_tokens") != 1, "--new-tokens must be at least 2, not 1: the first one is the prefill's")
    name = given.pop("implementation", OURS.name)
    if name not in IMPLEMENTATIONS:
        raise unknown("implementation", name, IMPLEMENTATIONS)
    ours = name == OURS.name
    check(ours or shape.moe is None, f"--implementation {name} has no experts (model.moe): it must be ours")
    own_step = "--phase train predicts this library's training step: --implementation must be ours"
    check(ours or phase != Phase.TRAIN.value, own_step)
    launch = member(Launch, "launch", given.pop("launch", Launch.AUTO))
    interleave = given.pop("interleave", AUTO)
    one_of = f"--interleave must be one of {', '.join(INTERLEAVES)}, not {interleave!r}"
    check(interleave in INTERLEAVES, one_of)
    form = member(ExpertParallelism, "--experts", given.pop("experts", ExpertParallelism.REDUCE))
    capacity = exchange_capacity(given.pop("capacity", None), config=shape, experts=form)
    chosen = words("residual", given.pop("residual")) if "residual" in given else None
    request = Request(
        model=model,
        shape=shape,
        machine=machine,
        residuals=chosen or _possible(shape, phase=phase, experts=form),
        implementation=IMPLEMENTATIONS[name],
        phase=None if phase == GENERATE else Phase(phase),
        launches=tuple(Launch) if launch is Launch.AUTO else (launch,),
        interleaves=INTERLEAVES[interleave],
        experts=form,
        capacity=capacity,
        **{"tensor": machine.devices, "batch": 1, **given},
    )
    _check(request, halved=interleave == "2" and chosen is not None)
    return request


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _possible(shape: ModelConfig, *, phase: str, experts: ExpertParallelism) -> tuple[str, ...]:
    """The residuals that can be predicted; where none can, all, for the reason that the check of each gives.

    Of a model with experts those that give all ranks the same input; with a shared one, farskip too. In training all
    but desync.
    """

    def can(residual: str) -> bool:
        name = parse_residual(residual)
        moe = shape.moe
        if moe is not None and name.depends_on_ranks:
            return False
        if phase == Phase.TRAIN.value and name.kind == "desync":
            return False
        if moe is None or experts is ExpertParallelism.REDUCE:
            return True
        try:
            check_exchange(dataclasses.replace(moe, capacity=1.0), residual=residual, **EXCHANGE)
        except UserError:
            return False
        return True

    every = (*RESIDUALS, *(EXPERT_RESIDUALS if shape.moe and shape.moe.shared_width else ()))
    return tuple(filter(can, every)) or every


def _check(request: Request, *, halved: bool) -> None:
    """halved: whether the user asks for two halves of named residuals."""
    check_tensor(request)
    exchanges = request.experts is ExpertParallelism.EXCHANGE
    any_ladder = False
    for name in request.residuals:
        config = request.config(name)
        parsed = parse_residual(name)
        any_ladder = any_ladder or parsed.is_ladder
        predicted = request.phase is not Phase.TRAIN or parsed.kind != "desync"
        check(predicted, f"--phase train has no prediction of {name}'s backward pass")
        if exchanges:
            check_exchange(config.moe, residual=name, **EXCHANGE)
        if halved:
            rows = request.batch if exchanges else 2
            check_halves(2, model=config, rows=rows, names=("--interleave", "--batch"), sequence_parallel=exchanges)
    names = ", ".join(request.residuals)
    check(any_ladder or request.ladder_layers is None, f"--ladder-layers needs a ladder kind of residual, not {names}")
    if exchanges:
        decoding = "decoding always reduces the experts' sums"
        whole = f"--experts exchange is for --phase prefill and train, not {GENERATE}: {decoding}"
        check(request.phase is not None, whole)
        alone = "--experts exchange sends rows to other ranks: --tensor must be at least 2, not 1"
        check(request.tensor > 1, alone)
        length = "--sequence" if request.phase is Phase.TRAIN else "--prompt-length"
        split = f"--experts exchange splits {length} {request.tokens} over --tensor {request.tensor}"
        check(request.tokens % request.tensor == 0, split)


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
