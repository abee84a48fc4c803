"""What a training step takes of a device's memory, from shapes alone.

    state      12 bytes a parameter: float32 values and AdamW's two moments, on 1 / (fsdp x tensor) of the devices each
    gradients  float32, split likewise: the sum so far, the microbatch's own, and what the loops hold while they add
    weights    matrices of two layers, gathered over fsdp, and one layer's gradients before they are given back
    kept       of every layer, what the backward pass reads again: what the remat policy says
    working    one layer, forward and backward, and the logits of a chunk of tokens

What a compiler really takes, its `memory_analysis()`, is larger or smaller by what it fuses, copies and cannot pack:
experiments/plan compares the two.
"""

import dataclasses

from ladder_jax import residual
from ladder_jax.config import Dtype, ModelConfig, Remat
from ladder_jax.plan.candidate import Candidate
from ladder_jax.plan.request import Request
from ladder_jax.residual import Step
from ladder_jax.schedule import shards

FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device, and of its host's memory that it uses (`host`)."""

    state: int
    gradients: int
    weights: int
    kept: int
    working: int
    host: int

    @property
    def device(self) -> int:
        return self.state + self.gradients + self.weights + self.kept + self.working


def estimate(candidate: Candidate, *, request: Request) -> Memory:
    config, mesh = request.config, candidate.mesh
    held = shards.shard(config, ranks=mesh.tensor)
    layer, table = held.attention + held.mlp, held.vocabulary * held.d_model
    tables = 1 if config.tie_embeddings else 2
    mine = (config.num_layers * layer + tables * table) // mesh.fsdp
    kept = kept_of_layers(candidate, request=request)
    offloaded = candidate.remat is Remat.OFFLOAD
    return Memory(
        state=3 * FLOAT32 * mine,
        gradients=_gradients(candidate) * FLOAT32 * mine,
        weights=_weights(layer, table, tables, candidate, config),
        kept=0 if offloaded else kept,
        working=_working(candidate, request=request),
        host=kept if offloaded else 0,
    )


def kept_of_layers(candidate: Candidate, *, request: Request) -> int:
    """Bytes that all layers keep for the backward pass."""
    config, length = request.config, request.sequence
    held = shards.shard(config, ranks=candidate.mesh.tensor)
    tokens, size, width = candidate.rows * length, size_of(config.dtype), config.d_model
    matmuls = (held.queries + 2 * held.keys + 2 * held.features) * size
    # Each norm: the stream and its normalised value in float32, and the sublayer's input; each sublayer's own.
    all_else = 2 * width * (2 * FLOAT32 + size) + (2 * held.queries + 3 * held.features) * size
    every = {Remat.NONE: matmuls + all_else, Remat.SAVE_MATMULS: matmuls}.get(candidate.remat, 0)
    scores = _scores(candidate, request=request) if candidate.remat is Remat.NONE else 0
    tables = FLOAT32 * length * config.head_dim  # the positions' cosines and sines
    inputs = sum(_input(steps, candidate, config) for steps in residual.of_model(config).layers)
    return int(tokens * inputs) + config.num_layers * (tokens * every + scores + tables)


def _input(steps: tuple[Step, ...], candidate: Candidate, config: ModelConfig) -> float:
    """Bytes a token of a layer's input and of the reduced sums that its sublayers read."""
    size, width = size_of(config.dtype), config.d_model
    share = candidate.mesh.tensor if candidate.sequence_parallel else 1
    kept = width * size_of(config.residual_dtype) / share + (len(steps) - 1) * width * size / share
    if any(getattr(step, "fresh", False) for step in steps):
        kept += width * size  # the partial sum that it reads
    if candidate.sequence_parallel and any(step.delay for step in steps):
        kept += width * size + width * size / share  # the input gathered before, and the shard that follows it
    return kept


def _gradients(candidate: Candidate) -> int:
    return 4 if candidate.accumulate > 1 else 2


def _weights(layer: int, table: int, tables: int, candidate: Candidate, config: ModelConfig) -> int:
    size = size_of(config.dtype)
    if candidate.mesh.fsdp == 1:
        return layer * (size + FLOAT32) + tables * table * size
    return 2 * layer * (size + FLOAT32) + table * (tables * size + 2 * FLOAT32)


def _working(candidate: Candidate, *, request: Request) -> int:
    config = request.config
    held = shards.shard(config, ranks=candidate.mesh.tensor)
    tokens, size = candidate.rows * request.sequence, size_of(config.dtype)
    layer = 6 * config.d_model * FLOAT32 + (4 * held.queries + 4 * held.keys + 6 * held.features) * size
    logits = 3 * FLOAT32 * min(tokens, 2048) * held.vocabulary
    return tokens * layer + logits + _scores(candidate, request=request)


def _scores(candidate: Candidate, *, request: Request) -> int:
    """Of attention without a kernel that keeps them on the chip: weights and their softmax, in and out."""
    if request.target.platform != "cpu":
        return 0
    heads = -(-request.config.num_heads // candidate.mesh.tensor)
    return 3 * FLOAT32 * candidate.rows * heads * request.sequence**2


def size_of(dtype: Dtype) -> int:
    return {Dtype.BFLOAT16: 2, Dtype.FLOAT32: 4}[dtype]
