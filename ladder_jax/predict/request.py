"""The checked arguments of `ladder-jax predict`, with defaults."""

import dataclasses

from ladder_jax.config import (
    EXPERT_RESIDUALS,
    RESIDUALS,
    Execution,
    ExpertParallelism,
    Interleave,
    Launch,
    ModelConfig,
    Phase,
    check_exchange,
    check_execution,
    parse_residual,
)
from ladder_jax.config.fields import check, not_none, passes
from ladder_jax.config.run import check_tensor
from ladder_jax.errors import unknown
from ladder_jax.overlap.request import exchange_capacity
from ladder_jax.predict import machine as machines
from ladder_jax.predict.machine import Halves, Machine
from ladder_jax.schedule import models

BASELINE = "standard"
GENERATE = "generate"
PHASES = (GENERATE, Phase.PREFILL.value, Phase.TRAIN.value)
# options, by name
OF_PHASES = {"prompt_length": PHASES[:2], "new_tokens": PHASES[:1], "sequence": PHASES[2:]}


@dataclasses.dataclass(frozen=True)
class Request:
    """model: as the user typed it; shape: its configuration. residuals: in the order of the
    result's rows.
    ladder_layers: makes hybrids of the ladder kinds among them.

    phase: PREFILL or TRAIN; None for a whole generation. sequence: tokens a row in training.
    launch: of hidden all-reduces. interleave: of prefill and training; a topology without halves
    has the whole batch. AUTO takes the fastest. experts, capacity: as in `overlap.request.Request`,
    of the rows; Standard's opponents have both forms wherever the model has a capacity.
    """

    model: str
    shape: ModelConfig
    machine: Machine
    tensor: int
    residuals: tuple[str, ...]
    batch: int = 1
    prompt_length: int = 1024
    new_tokens: int = 512
    ladder_layers: str | None = None
    layers: int | None = None
    phase: Phase | None = None
    sequence: int = 2048
    launch: Launch = Launch.AUTO
    interleave: Interleave = Interleave.AUTO
    experts: ExpertParallelism = ExpertParallelism.REDUCE
    capacity: float | None = None

    @property
    def forms(self) -> tuple[ExpertParallelism, ...]:
        """Those in which Standard can compute the model. One without a capacity drops no row, as an
        exchange may.
        """
        splits = self.tensor > 1 and self.tokens % self.tensor == 0
        moe = self.config(BASELINE).moe
        exchanges = passes(check_exchange, moe, residual=BASELINE, sequence_parallel=True)
        return tuple(ExpertParallelism) if splits and exchanges else (ExpertParallelism.REDUCE,)

    @property
    def tokens(self) -> int:
        """Tokens a row of a prefill or a training step."""
        return self.sequence if self.phase is Phase.TRAIN else self.prompt_length

    @property
    def passed(self) -> int:
        """Tokens of all rows that are generated, or pass."""
        return self.batch * (self.tokens if self.phase else self.new_tokens)

    def config(self, residual: str) -> ModelConfig:
        """The model's configuration with one of the residuals."""
        return models.variant(
            self.shape,
            residual,
            ranks=self.tensor,
            layers=self.layers,
            ladder_layers=self.ladder_layers if parse_residual(residual).is_ladder else None,
            capacity=self.capacity,
        )


def make(
    *,
    model: str,
    hardware: str,
    phase: str | None = None,
    residual: str | None = None,
    capacity: float | None = None,
    **options: object,
) -> Request:
    """A checked request. Raises UserError.

    The arguments are those of `ladder-jax predict`, by name: options are further fields of
    `Request`. None gives a default: all devices, all residuals that can be predicted.
    """
    shape = models.by_name(model)
    machine = machines.load(hardware)
    options = not_none(options)
    phase = phase or GENERATE
    if phase not in PHASES:
        raise unknown("phase", phase, PHASES)
    for name, phases in OF_PHASES.items():
        option = f"--{name.replace('_', '-')}"
        belongs = f"{option} belongs to --phase {' and '.join(phases)}, not {phase}"
        check(name not in options or phase in phases, belongs)
    check(
        options.get("new_tokens") != 1,
        "--new-tokens must be at least 2, not 1: the first one is the prefill's",
    )
    experts = options.get("experts", ExpertParallelism.REDUCE)
    shared = shape.moe is not None and shape.moe.shared_width
    every = (*RESIDUALS, *(EXPERT_RESIDUALS if shared else ()))
    request = Request(
        model=model,
        shape=shape,
        machine=machine,
        residuals=every if residual is None else tuple(residual.split(",")),
        phase=None if phase == GENERATE else Phase(phase),
        capacity=exchange_capacity(capacity, config=shape, experts=experts),
        **{"tensor": machine.devices, **options},
    )
    check_tensor(shape, tensor=request.tensor, devices=machine.devices, where=machine.name)
    if residual is None:
        plain = dataclasses.replace(request, ladder_layers=None, interleave=Interleave.AUTO)
        possible = tuple(name for name in every if passes(_check_residual, plain, name))
        # Where none is possible, each is refused for its reason.
        request = dataclasses.replace(request, residuals=possible or every)
    for name in request.residuals:
        _check_residual(request, name, named=residual is not None)
    _check(request)
    return request


def _check_residual(request: Request, name: str, *, named: bool = False) -> None:
    """named: whether the user named it; then it has two halves in turn where they are asked for."""
    config = request.config(name)
    predicted = request.phase is not Phase.TRAIN or parse_residual(name).kind != "desync"
    check(predicted, f"--phase train has no prediction of {name}'s backward pass")
    exchanges = request.experts is ExpertParallelism.EXCHANGE
    if exchanges:
        # a bound that no program computes: a Standard without its messages
        known = BASELINE if name == "no-communication" else name
        check_exchange(config.moe, residual=known, sequence_parallel=True)
    if named and request.interleave is Interleave.HALVES:
        rows = request.batch if exchanges else 2
        check_execution(Execution(interleave=2), model=config, rows=rows, splits=exchanges)


def _check(request: Request) -> None:
    any_ladder = any(parse_residual(name).is_ladder for name in request.residuals)
    names = ", ".join(request.residuals)
    check(
        any_ladder or request.ladder_layers is None,
        f"--ladder-layers needs a ladder kind of residual, not {names}",
    )
    check(
        request.interleave is not Interleave.HALVES or request.tensor > 1,
        "--interleave 2 hides sums over several ranks: --tensor must be at least 2, not 1",
    )
    if request.launch is Launch.EXPLICIT:
        link = request.machine.link
        check(
            request.phase is not Phase.TRAIN,
            "--launch explicit is for generate and prefill, not for train: it has no gradient",
        )
        check(
            link is None or link.halves is Halves.SUPPORTED,
            f"--launch explicit: {request.machine.name} starts no all-reduce apart (allowed: auto, chained)",
        )
    if request.experts is ExpertParallelism.EXCHANGE:
        length = "--sequence" if request.phase is Phase.TRAIN else "--prompt-length"
        check(
            request.phase is not None,
            f"--experts exchange is for --phase prefill and train, not {GENERATE}: decoding always reduces"
            " the experts' sums",
        )
        check(
            request.tensor > 1,
            "--experts exchange sends rows to other ranks: --tensor must be at least 2, not 1",
        )
        check(
            request.tokens % request.tensor == 0,
            f"--experts exchange splits {length} {request.tokens} over --tensor {request.tensor}",
        )
