"""Estimate a training step's memory on one device from shapes.

    state      12 bytes per parameter: float32 values and AdamW's two moments, sharded over fsdp x tensor
    gradients  float32, sharded likewise: the accumulated sum, the microbatch's gradients, and the loops' copies of both
    weights    matrices of two layers, gathered over fsdp, and one layer's gradients before their reduce-scatter
    kept       activations of all layers that the remat policy keeps for the backward pass
    working    temporaries of one layer, forward and backward, and the logits of a chunk of tokens

The compiler's own figure, `memory_analysis()`, differs because of fusion, copies and fragmentation; experiments/plan
compares the two. Rows of exchanged experts are in plan/exchange.py.
"""

import dataclasses

from ladder_jax import residual
from ladder_jax.config import ModelConfig, Remat
from ladder_jax.nn.experts import CHUNK
from ladder_jax.plan import exchange
from ladder_jax.plan.candidate import Candidate
from ladder_jax.plan.request import FLOAT32, Request, size_of
from ladder_jax.residual import Step
from ladder_jax.schedule import shards


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device by purpose. host: bytes of its host's memory."""

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
    shard = shards.shard(config, ranks=mesh.tensor)
    layer, table = shards.largest_layer(config, ranks=mesh.tensor), shard.vocabulary * shard.d_model
    tables = 1 if config.tie_embeddings else 2
    parameters = (shards.layers(config, ranks=mesh.tensor) + tables * table) // mesh.fsdp
    kept = kept_activations(candidate, request=request)
    offloaded = candidate.remat is Remat.OFFLOAD
    return Memory(
        state=3 * FLOAT32 * parameters,
        gradients=_gradients(candidate) * FLOAT32 * parameters,
        weights=_weights(layer, table, tables, candidate, config),
        kept=0 if offloaded else kept,
        working=_working(candidate, request=request),
        host=kept if offloaded else 0,
    )


def kept_activations(candidate: Candidate, *, request: Request) -> int:
    """Bytes of the activations that all layers keep for the backward pass."""
    config, length = request.config, request.sequence
    shard = shards.shard(config, ranks=candidate.mesh.tensor)
    tokens, size, width = candidate.rows * length, size_of(config.dtype), config.d_model
    matmuls = config.num_layers * (shard.queries + 2 * shard.keys) * size
    # Per norm: the stream and its normalised value in float32, and the sublayer's input. Then other activations.
    norms = 2 * width * (2 * FLOAT32 + size)
    if candidate.exchanges:  # of a device's own positions; and attention's input, gathered, before and after its gain
        norms = norms // candidate.mesh.tensor + 2 * width * size
    others = config.num_layers * (norms + 2 * shard.queries * size)
    for count, kind in shards.kinds(config):
        of_mlp = _mlp_activations(candidate, kind, routed=tokens <= CHUNK)
        matmuls, others = matmuls + count * of_mlp[0] * size, others + count * of_mlp[1] * size
    per_token = {Remat.NONE: matmuls + others, Remat.SAVE_MATMULS: matmuls}.get(candidate.remat, 0)
    scores = _scores(candidate, request=request) if candidate.remat is Remat.NONE else 0
    tables = FLOAT32 * length * config.head_dim  # the positions' cosines and sines
    layers = residual.of_model(config).layers
    inputs = sum(_input(steps, candidate, config) for steps in layers)
    rows = 0
    if candidate.exchanges:
        rows = config.num_layers * exchange.kept(candidate, request=request)
        rows += sum(exchange.entering(steps[0], candidate, request=request) for steps in layers)
    return int(tokens * (inputs + per_token)) + config.num_layers * (scores + tables) + rows


def _mlp_activations(candidate: Candidate, config: ModelConfig, *, routed: bool) -> tuple[int, int]:
    """Elements a token: the outputs of matmuls, and the other activations. routed: with those of routed experts.

    A device sorts the (token, choice) rows of all ranks' experts, so they do not become fewer with more ranks. If there
    are more tokens than a chunk, it keeps no rows, and computes each chunk again.
    """
    moe, ranks = config.moe, candidate.mesh.tensor
    if moe is None:
        return 2 * config.d_ff // ranks, 3 * config.d_ff // ranks
    shared = moe.shared_width // ranks
    if not routed or candidate.exchanges:
        return 2 * shared, 3 * shared
    rows, stream = moe.top_k * moe.expert_width, moe.top_k * config.d_model
    return 2 * (rows + shared) + stream, 3 * (rows + shared) + 2 * stream


def _input(steps: tuple[Step, ...], candidate: Candidate, config: ModelConfig) -> float:
    """Bytes per token of a layer's input and of the reduced sums that its sublayers read."""
    size, width = size_of(config.dtype), config.d_model
    ranks = candidate.mesh.tensor if candidate.sequence_parallel else 1
    kept = width * size_of(config.residual_dtype) / ranks + (len(steps) - 1) * width * size / ranks
    if any(getattr(step, "fresh", False) for step in steps):
        kept += width * size  # the partial sum that a fresh step reads
    if candidate.sequence_parallel and any(step.delay for step in steps):
        kept += width * size + width * size / ranks  # the gathered input, and the next shard
    return kept


def _gradients(candidate: Candidate) -> int:
    return 4 if candidate.accumulate > 1 else 2


def _weights(layer: int, table: int, tables: int, candidate: Candidate, config: ModelConfig) -> int:
    size = size_of(config.dtype)
    if candidate.mesh.fsdp == 1:
        return layer * (size + FLOAT32) + tables * table * size
    # With several microbatches, float32 gradients of the whole tables: the current one's and their sum.
    gradients = 2 * tables * FLOAT32 if candidate.accumulate > 1 else 0
    return 2 * layer * (size + FLOAT32) + table * (tables * size + gradients)


def _working(candidate: Candidate, *, request: Request) -> int:
    config = request.config
    shard = shards.shard(config, ranks=candidate.mesh.tensor)
    tokens, size = candidate.rows * request.sequence, size_of(config.dtype)
    attention = 6 * config.d_model * FLOAT32 + (4 * shard.queries + 4 * shard.keys) * size
    logits = 3 * FLOAT32 * min(tokens, 2048) * shard.vocabulary
    rows = exchange.working(candidate, request=request) if candidate.exchanges else 0
    mlp = max(_mlp_working(candidate, kind, tokens=tokens) for _, kind in shards.kinds(config)) * size
    return tokens * attention + mlp + rows + logits + _scores(candidate, request=request)


def _mlp_working(candidate: Candidate, config: ModelConfig, *, tokens: int) -> int:
    """Elements of a sublayer's temporaries; of experts, of one chunk of tokens."""
    matmuls, others = _mlp_activations(candidate, config, routed=True)
    return tokens * 2 * others if config.moe is None else min(tokens, CHUNK) * (matmuls + others)


def _scores(candidate: Candidate, *, request: Request) -> int:
    """Bytes of attention scores and their softmax. CPU only: elsewhere a kernel keeps them on the chip."""
    if request.target.platform != "cpu":
        return 0
    heads = -(-request.config.num_heads // candidate.mesh.tensor)
    return 3 * FLOAT32 * candidate.rows * heads * request.sequence**2
