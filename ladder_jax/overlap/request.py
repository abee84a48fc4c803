"""What `ladder-jax overlap` compiles: its checked options, with defaults; imports no jax."""

import dataclasses
from typing import Any

from ladder_jax.config import (
    PRESETS,
    CollectiveMatmul,
    Execution,
    ExpertParallelism,
    Launch,
    Loop,
    MeshConfig,
    ModelConfig,
    Phase,
    Quantize,
    Remat,
    RunConfig,
    TrainConfig,
    preset,
    recipe,
    to_dict,
)
from ladder_jax.config.fields import Section, check, not_none
from ladder_jax.hardware import HARDWARE
from ladder_jax.schedule import models, targets
from ladder_jax.schedule.grouped import Experts, Form
from ladder_jax.schedule.targets import Target

CAPACITY = 1.25  # of exchanged experts, unless the model has one


@dataclasses.dataclass(frozen=True)
class Request(Section):
    """A program to compile. All fields but `shape` are options of the command line.

    model: as the user typed it. shape: its configuration, where it is no preset.
    batch: rows on one data shard; the fsdp axis shards the batch too.
    context: the cache's capacity in positions per row. Decode fills all of them, prefill those of
        the prompt.
    sequence_parallel: the stream is split along the sequence over the tensor axis (see
        residual/wires/sequence.py).
    collective_matmul: of sequence parallelism's gathers and scatters that no other sublayer hides.
    interleave: 2 takes two halves of the rows in turn (residual/interleave.py).
    experts: how the rows of other ranks' experts are computed. capacity: of exchanged ones (see
        config.MoEConfig).
    """

    target: Target
    model: str
    residual: str
    phase: Phase
    loop: Loop
    layers: int
    tensor: int
    batch: int
    prompt_length: int
    context: int
    ladder_layers: str | None = None
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
        return models.variant(
            self.shape or preset(self.model),
            self.residual,
            ranks=self.tensor,
            layers=self.layers,
            ladder_layers=self.ladder_layers,
            capacity=self.capacity,
        )

    def run(self) -> RunConfig:
        """As `ladder-jax train` takes it, without what is of serving alone. Raises UserError where it
        trains no such thing.
        """
        settings = recipe(self.model) | dict(
            batch=self.batch * self.fsdp,
            sequence=self.prompt_length,
            loop=self.loop,
            remat=self.remat,
            sequence_parallel=self.sequence_parallel,
            collective_matmul=self.collective_matmul,
            interleave=self.interleave,
        )
        mesh = MeshConfig(fsdp=self.fsdp, tensor=self.tensor, experts=self.experts)
        return RunConfig(model=self.config, mesh=mesh, train=TrainConfig(**settings))

    @property
    def trains(self) -> bool:
        return self.phase is Phase.TRAIN

    @property
    def exchanges(self) -> bool:
        return self.experts is ExpertParallelism.EXCHANGE

    @property
    def tokens(self) -> int:
        """Tokens that one device computes in one execution: a decode step has one per row."""
        return self.batch if self.phase is Phase.DECODE else self.batch * self.prompt_length

    def as_dict(self) -> dict:
        """The options, as plain JSON values."""
        values = {**to_dict(self), "target": self.target.name}
        if self.shape is None:
            del values["shape"]
        return values


def make(*, target: str, model: str, phase: Phase, **options: Any) -> Request:
    """A checked request. options: its other fields; None is the default. Raises UserError for an
    invalid one.
    """
    parsed = targets.parse(target)
    config = models.by_name(model)
    options = not_none(options)
    decodes = phase is Phase.DECODE
    prompt = options.get("prompt_length", 1024)
    experts = options.get("experts", ExpertParallelism.REDUCE)
    defaults = dict(
        loop=Loop.SCAN if phase is Phase.TRAIN else Loop.UNROLLED,
        layers=config.num_layers,
        tensor=max(1, parsed.count // options.get("fsdp", 1)),
        batch=16 if decodes else 1,
        prompt_length=prompt,
        context=2048,
    )
    settled = dict(
        capacity=exchange_capacity(options.get("capacity"), config=config, experts=experts),
        shape=None if model in PRESETS else config,
    )
    context = options.get("context", prompt)
    if not decodes:
        settled["context"] = max(context, prompt)
    request = Request(target=parsed, model=model, phase=phase, **{**defaults, **options, **settled})
    check_request(request)
    check(
        not decodes or "prompt_length" not in options,
        "--prompt-length is for train and prefill: of decode --context says how full the cache is",
    )
    check(
        phase is not Phase.TRAIN or "context" not in options,
        "--context is for prefill and decode: training has no cache",
    )
    check(
        decodes or context >= prompt,
        f"--context {context} has no room for --prompt-length {prompt}",
    )
    return request


def check_request(request: Request) -> None:
    """Raises UserError where the library has no such program."""
    tensor = request.tensor
    fsdp = request.fsdp
    target = request.target
    phase = request.phase
    product = f"--tensor {tensor}" + (f" x --fsdp {fsdp}" if fsdp > 1 else "")
    check(
        tensor * fsdp <= target.count,
        f"{product} is more than the {target.count} devices of {target.name}",
    )
    check(
        fsdp == 1 or request.trains,
        f"--fsdp is for train (serving keeps every layer's weights), not for {phase.value}",
    )
    check(
        phase is not Phase.DECODE or request.interleave == 1,
        "--interleave 2 is for train and prefill: a decode step has too few rows to halve",
    )
    if request.sequence_parallel:
        check(
            phase is not Phase.DECODE,
            "--sequence-parallel is for train and prefill: a decode step has one position a row",
        )
        check(
            request.prompt_length % tensor == 0,
            f"--sequence-parallel splits --prompt-length {request.prompt_length} over --tensor {tensor}",
        )
    Execution(interleave=request.interleave)  # its own check
    if request.trains:
        check(
            request.launch is not Launch.EXPLICIT,
            "--launch explicit is for prefill and decode, not for train: it has no gradient",
        )
        check(
            request.quantize is Quantize.NONE,
            f"--quantize {request.quantize.value} is for prefill and decode, not for train",
        )
    else:
        check(
            request.remat is Remat.NONE,
            f"--remat {request.remat.value} is for train: {phase.value} has no backward pass",
        )
    request.run()  # its own checks: of the model, the mesh, the stream, halves and experts


def exchange_capacity(
    capacity: float | None, *, config: ModelConfig, experts: ExpertParallelism
) -> float | None:
    """The option's, the model's, or CAPACITY, where rows are exchanged; None elsewhere. Raises
    UserError.
    """
    if experts is ExpertParallelism.REDUCE:
        check(capacity is None, f"--capacity {capacity} is for --experts exchange")
        return None
    return None if config.moe is None else capacity or config.moe.capacity or CAPACITY


def experts(request: Request) -> Experts | None:
    """What a device computes of the model's experts; None of a dense model."""
    moe = request.config.moe
    return None if moe is None else Experts(moe, request.tensor, HARDWARE.get(request.target.kind))


def sublayer_flops(request: Request, *, form: Form = Form.KERNELS) -> dict[str, float]:
    """Forward matmul FLOPs of one sublayer's projections on one device, by kind (see
    `schedule.judge.read`).

    Of two halves in turn, a sublayer is that of one half.
    form: of the experts' matmuls. Expanded, every (token, choice) row passes all of the device's
        experts.
    """
    config = request.config
    shard = models.shard(config, ranks=request.tensor)
    moe = config.moe
    per_token = shard.active_mlp
    if moe is not None and form is Form.EXPANDED:
        held = moe.padded(request.tensor) // request.tensor
        own = moe.top_k / request.tensor
        per_token += 3 * config.d_model * moe.expert_width * (moe.top_k * held - own)
    tokens = request.tokens / request.interleave
    attention = 2 * tokens * shard.attention
    mlp = 2 * tokens * per_token
    return {"attention": attention, "mlp": mlp, "joint": attention + mlp}


def active_flops(request: Request) -> float:
    """The least matmul FLOPs of one execution on one device, without attention's scores: each token
    times the matrices that it passes, forward, and in training twice more backward; the head, of a
    prompt its last position only.
    """
    config = request.config
    scored = request.tokens if request.trains else request.batch
    layers = request.tokens * models.active_layers(config, ranks=request.tensor)
    head = scored * models.shard(config, ranks=request.tensor).vocabulary * config.d_model
    return (3 if request.trains else 1) * 2 * (layers + head)
