"""The checked arguments of `ladder-jax overlap`, with defaults; imports no jax."""

import dataclasses
import enum
import math

from ladder_jax.config import (
    PRESETS,
    CollectiveMatmul,
    ExpertParallelism,
    Launch,
    Loop,
    MeshConfig,
    ModelConfig,
    Phase,
    Quantize,
    Remat,
    check_collective_matmul,
    check_exchange,
    check_fits_mesh,
    check_halves,
    model_from_dict,
    parse_residual,
    preset,
    to_dict,
)
from ladder_jax.config.fields import check
from ladder_jax.errors import UserError
from ladder_jax.hardware import HARDWARE
from ladder_jax.schedule import models, shards, targets
from ladder_jax.schedule.grouped import Experts, Form
from ladder_jax.schedule.targets import Target

CAPACITY = 1.25  # of exchanged experts, unless the model has one


@dataclasses.dataclass(frozen=True)
class Request:
    """A program to compile.

    model: as the user typed it. shape: its configuration, where it is no preset.
    batch: rows on one data shard; the fsdp axis shards the batch too.
    context: the cache's capacity in positions per row. Decode fills all of them, prefill those of the prompt.
    sequence_parallel: the stream is split along the sequence over the tensor axis (see residual/wires/sequence.py).
    collective_matmul: of sequence parallelism's gathers and scatters that no other sublayer hides.
    interleave: 2 takes two halves of the rows in turn (residual/interleave.py).
    experts: how the rows of other ranks' experts are computed. capacity: of exchanged ones (see config.MoEConfig).
    """

    target: Target
    model: str
    residual: str
    ladder_layers: str | None
    phase: Phase
    loop: Loop
    layers: int
    tensor: int
    batch: int
    prompt_length: int
    context: int
    remat: Remat = Remat.NONE
    launch: Launch = Launch.AUTO
    quantize: Quantize = Quantize.NONE
    fsdp: int = 1
    sequence_parallel: bool = False
    collective_matmul: CollectiveMatmul = CollectiveMatmul.NONE
    interleave: int = 1
    experts: ExpertParallelism = ExpertParallelism.REDUCE
    capacity: float | None = None
    shape: ModelConfig | None = None

    @property
    def config(self) -> ModelConfig:
        changes = dict(num_layers=self.layers, residual=self.residual, ladder_layers=self.ladder_layers)
        ranks = self.tensor if parse_residual(self.residual).depends_on_ranks else None
        config = dataclasses.replace(self.shape or preset(self.model), **changes, ranks=ranks)
        if self.capacity is None:
            return config
        return dataclasses.replace(config, moe=dataclasses.replace(config.moe, capacity=self.capacity))

    @property
    def tokens(self) -> int:
        """Tokens that one device computes in one execution: a decode step has one per row."""
        return self.batch if self.phase is Phase.DECODE else self.batch * self.prompt_length

    def as_dict(self) -> dict:
        named = [f.name for f in dataclasses.fields(self) if f.name not in ("target", "shape")]
        values = {"target": self.target.name, **{name: _json_value(getattr(self, name)) for name in named}}
        return values if self.shape is None else {**values, "shape": to_dict(self.shape)}

    @classmethod
    def from_dict(cls, values: dict) -> "Request":
        enums = dict(phase=Phase, loop=Loop, remat=Remat, launch=Launch, quantize=Quantize)
        enums |= dict(collective_matmul=CollectiveMatmul, experts=ExpertParallelism)
        converted = {name: enums[name](value) if name in enums else value for name, value in values.items()}
        if "shape" in values:
            converted["shape"] = model_from_dict(values["shape"])
        return cls(**{**converted, "target": targets.parse(values["target"])})


def make(
    *,
    target: str,
    model: str,
    residual: str,
    phase: Phase,
    ladder_layers: str | None = None,
    loop: Loop | None = None,
    layers: int | None = None,
    tensor: int | None = None,
    batch: int | None = None,
    prompt_length: int | None = None,
    context: int | None = None,
    remat: Remat = Remat.NONE,
    launch: Launch = Launch.AUTO,
    quantize: Quantize = Quantize.NONE,
    fsdp: int | None = None,
    sequence_parallel: bool = False,
    collective_matmul: CollectiveMatmul = CollectiveMatmul.NONE,
    interleave: int | None = None,
    experts: ExpertParallelism = ExpertParallelism.REDUCE,
    capacity: float | None = None,
) -> Request:
    """A checked request. Raises UserError for an invalid one."""
    parsed = targets.parse(target)
    config = models.by_name(model)
    count = parsed.count
    numbers = dict(layers=layers, tensor=tensor, fsdp=fsdp, batch=batch, prompt_length=prompt_length, context=context)
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be positive, not {value}")
    fsdp = fsdp or 1
    tensor = max(1, count // fsdp) if tensor is None else tensor
    if tensor * fsdp > count:
        options = f"--tensor {tensor}" + (f" x --fsdp {fsdp}" if fsdp > 1 else "")
        raise UserError(f"{options} is more than the {count} devices of {parsed.name}")
    request = Request(
        target=parsed,
        model=model,
        residual=residual,
        ladder_layers=ladder_layers,
        phase=phase,
        loop=loop or (Loop.SCAN if phase is Phase.TRAIN else Loop.UNROLLED),
        layers=layers or config.num_layers,
        tensor=tensor,
        batch=batch or (16 if phase is Phase.DECODE else 1),
        prompt_length=prompt_length or 1024,
        context=(context or 2048) if phase is Phase.DECODE else max(context or 0, prompt_length or 1024),
        remat=remat,
        launch=launch,
        quantize=quantize,
        fsdp=fsdp,
        sequence_parallel=sequence_parallel,
        collective_matmul=collective_matmul,
        interleave=1 if interleave is None else interleave,
        experts=experts,
        capacity=exchange_capacity(capacity, config=config, experts=experts),
        shape=None if model in PRESETS else config,
    )
    if fsdp > 1 and phase is not Phase.TRAIN:
        raise UserError(f"--fsdp is for train (serving keeps every layer's weights), not for {phase.value}")
    if sequence_parallel and phase is Phase.DECODE:
        raise UserError("--sequence-parallel is for train and prefill: a decode step has one position a row")
    if sequence_parallel and request.prompt_length % tensor:
        raise UserError(f"--sequence-parallel splits --prompt-length {request.prompt_length} over --tensor {tensor}")
    check_collective_matmul(
        collective_matmul,
        model=request.config,
        sequence_parallel=sequence_parallel,
        names=("--collective-matmul", "--sequence-parallel"),
    )
    check_in_turn(request)
    if experts is ExpertParallelism.EXCHANGE:
        names = "--experts exchange", "--capacity", "--sequence-parallel"
        check_exchange(request.config.moe, residual=residual, sequence_parallel=sequence_parallel, names=names)
    if collective_matmul is CollectiveMatmul.COMPILER and parsed.platform != "tpu":
        raise UserError(f"--collective-matmul compiler is an option of XLA for TPUs, not for {parsed.name}: use ring")
    if launch is Launch.EXPLICIT and phase is Phase.TRAIN:
        raise UserError("--launch explicit is for prefill and decode, not for train: it has no gradient")
    if quantize is not Quantize.NONE and phase is Phase.TRAIN:
        raise UserError(f"--quantize {quantize.value} is for prefill and decode, not for train")
    check_fits_mesh(request.config, MeshConfig(fsdp=fsdp, tensor=tensor))
    return request


def check_in_turn(request: Request) -> None:
    """Raises UserError where two halves in turn are no program of this request."""
    if request.interleave == 2 and request.phase is Phase.DECODE:
        raise UserError("--interleave 2 is for train and prefill: a decode step has too few rows to halve")
    check_halves(
        request.interleave,
        model=request.config,
        rows=request.batch,
        sequence_parallel=request.sequence_parallel and request.tensor > 1,
        collective_matmul=request.collective_matmul,
        names=("--interleave", "--batch"),
    )


def exchange_capacity(capacity: float | None, *, config: ModelConfig, experts: ExpertParallelism) -> float | None:
    """The option's, the model's, or CAPACITY, where rows are exchanged; None elsewhere. Raises UserError."""
    if experts is ExpertParallelism.REDUCE:
        check(capacity is None, f"--capacity {capacity} is for --experts exchange")
        return None
    check(capacity is None or 0 < capacity < math.inf, f"--capacity must be positive, not {capacity}")
    return None if config.moe is None else capacity or config.moe.capacity or CAPACITY


def experts(request: Request) -> Experts | None:
    """What a device computes of the model's experts; None of a dense model."""
    moe = request.config.moe
    return None if moe is None else Experts(moe, request.tensor, HARDWARE.get(request.target.kind))


def sublayer_flops(request: Request, *, form: Form = Form.KERNELS) -> dict[str, float]:
    """Forward matmul FLOPs of one sublayer's projections on one device, by kind (see `schedule.judge.read`).

    Of two halves in turn, a sublayer is that of one half.
    form: of the experts' matmuls. Expanded, every (token, choice) row passes all of the device's experts.
    """
    shard, moe = shards.shard(request.config, ranks=request.tensor), request.config.moe
    per_token = shard.active_mlp
    if moe is not None and form is Form.EXPANDED:
        held, own = -(-moe.experts // request.tensor), moe.top_k / request.tensor
        per_token += 3 * shard.d_model * moe.expert_width * (moe.top_k * held - own)
    tokens = request.tokens / request.interleave
    attention, mlp = 2 * tokens * shard.attention, 2 * tokens * per_token
    return {"attention": attention, "mlp": mlp, "joint": attention + mlp}


def active_flops(request: Request) -> float:
    """The least matmul FLOPs of one execution on one device, without attention's scores: each token times the matrices
    that it passes, forward, and in training twice more backward; the head, of a prompt its last position only."""
    config, trains = request.config, request.phase is Phase.TRAIN
    shard = shards.shard(config, ranks=request.tensor)
    scored = request.tokens if trains else request.batch
    layers = request.tokens * shards.active_layers(config, ranks=request.tensor)
    return (3 if trains else 1) * 2 * (layers + scored * shard.vocabulary * shard.d_model)


def _json_value(value: object) -> object:
    return value.value if isinstance(value, enum.Enum) else value
