"""Estimate a training step's memory on one device from shapes.

    state      12 bytes per parameter: float32 values and AdamW's two moments, sharded over fsdp x tensor
    gradients  float32, sharded likewise: the accumulated sum, the microbatch's gradients, and the
               loops' copies of both
    weights    matrices of two layers, gathered over fsdp, and one layer's gradients before their
               reduce-scatter
    kept       activations of all layers that the remat policy keeps for the backward pass
    working    temporaries of one layer, forward and backward, and the logits of a chunk of tokens

The compiler's own figure, `memory_analysis()`, differs because of fusion, copies and fragmentation;
experiments/plan compares the two.

Where ranks exchange the rows of experts, a device's buffers are kept, E S rows, full or not
(`predict.work`):

    none           the rows that its experts read, their products and activations, and in float32 the rows that return
    save-matmuls   the rows that its experts read, gate and up, and the rows that return
    full, offload  none of them; but the experts' outputs, with which a layer begins if the next
                   attention hides the rows' way back
"""

import dataclasses

from ladder_jax.config import ModelConfig, Remat
from ladder_jax.nn.experts import CHUNK
from ladder_jax.plan.request import Candidate
from ladder_jax.predict.program import layers_of
from ladder_jax.predict.work import FLOAT32, Block, Model, size_of
from ladder_jax.residual import Step
from ladder_jax.schedule import models


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


def estimate(candidate: Candidate) -> Memory:
    mesh = candidate.mesh
    model, block = candidate.microbatch
    parameters = model.parameters // mesh.fsdp
    kept = kept_activations(candidate, model, block)
    several = candidate.accumulate > 1
    offloaded = candidate.remat is Remat.OFFLOAD
    layer = models.largest_layer(model.config, ranks=mesh.tensor)
    size = model.element_bytes
    weights = layer * (size + FLOAT32) + model.tables * size
    if mesh.fsdp > 1:
        weights += layer * (size + FLOAT32)
    # float32 gradients of the whole tables: the current microbatch's, and their sum
    if mesh.fsdp > 1 and several:
        weights += 2 * model.tables * FLOAT32
    return Memory(
        state=3 * FLOAT32 * parameters,
        gradients=(4 if several else 2) * FLOAT32 * parameters,
        weights=weights,
        kept=0 if offloaded else kept,
        working=_working(candidate, model, block),
        host=kept if offloaded else 0,
    )


def kept_activations(candidate: Candidate, model: Model, block: Block) -> int:
    """Bytes of the activations that all layers keep for the backward pass."""
    config = model.config
    shard = model.shard
    size = model.element_bytes
    layers = config.num_layers
    matmuls = layers * (shard.queries + 2 * shard.keys) * size
    # Per norm: the stream and its normalised value in float32, and the sublayer's input. Then other
    # activations.
    norms = 2 * config.d_model * (2 * FLOAT32 + size)
    # of a device's own positions; and attention's input, gathered, before and after its gain
    if candidate.exchanges:
        norms = norms // model.ranks + 2 * config.d_model * size
    others = layers * (norms + 2 * shard.queries * size)
    for count, kind in models.kinds(config):
        products, rest = _mlp_activations(candidate, kind, routed=block.size <= CHUNK)
        matmuls += count * products * size
        others += count * rest * size
    by_policy = {Remat.NONE: matmuls + others, Remat.SAVE_MATMULS: matmuls}
    per_token = by_policy.get(candidate.remat, 0)
    tables = FLOAT32 * block.tokens * config.head_dim  # the positions' cosines and sines
    of_layers = layers_of(config)
    inputs = sum(_input(steps, candidate, config) for steps in of_layers)
    rows = 0
    if candidate.exchanges:
        rows = sum(_kept_rows(steps[0], candidate, model, block) for steps in of_layers)
    return int(block.size * (inputs + per_token)) + layers * tables + rows


def _kept_rows(first: Step, candidate: Candidate, model: Model, block: Block) -> int:
    """Bytes of a layer's exchanged rows that are kept, without the layer's input. first: its first
    step.
    """
    rows = model.buffer_rows(block)
    size = model.element_bytes
    stream = model.config.d_model * size
    width = model.config.moe.expert_width * size
    if candidate.remat is Remat.NONE:
        return rows * (stream + 5 * width) + _returning(model, block)
    if candidate.remat is Remat.SAVE_MATMULS:
        return rows * (2 * stream + 2 * width)
    return rows * stream if first.delay else 0


def _returning(model: Model, block: Block) -> int:
    """Bytes of the rows that return to a device's own tokens, which are added up in float32."""
    return block.size // model.ranks * model.config.moe.top_k * model.config.d_model * FLOAT32


def _mlp_activations(candidate: Candidate, config: ModelConfig, *, routed: bool) -> tuple[int, int]:
    """Elements a token: the outputs of matmuls, and the other activations. routed: with those of
    routed experts.

    A device sorts the (token, choice) rows of all ranks' experts, so they do not become fewer with
    more ranks. If there are more tokens than a chunk, it keeps no rows, and computes each chunk
    again.
    """
    moe = config.moe
    ranks = candidate.mesh.tensor
    if moe is None:
        return 2 * config.d_ff // ranks, 3 * config.d_ff // ranks
    shared = moe.shared_width // ranks
    if not routed or candidate.exchanges:
        return 2 * shared, 3 * shared
    rows = moe.top_k * moe.expert_width
    stream = moe.top_k * config.d_model
    return 2 * (rows + shared) + stream, 3 * (rows + shared) + 2 * stream


def _input(steps: tuple[Step, ...], candidate: Candidate, config: ModelConfig) -> float:
    """Bytes per token of a layer's input and of the reduced sums that its sublayers read."""
    width = config.d_model * size_of(config.dtype)
    ranks = candidate.mesh.tensor if candidate.sequence_parallel else 1
    kept = (
        config.d_model * size_of(config.residual_dtype) / ranks + (len(steps) - 1) * width / ranks
    )
    if any(step.fresh for step in steps):
        kept += width  # the partial sum that a fresh step reads
    if candidate.sequence_parallel and any(step.delay for step in steps):
        kept += width + width / ranks  # the gathered input, and the next shard
    return kept


def _working(candidate: Candidate, model: Model, block: Block) -> int:
    """Bytes of a layer's temporaries, with exchanged rows; of experts, of one chunk of tokens.
    Attention's scores stay on the chip (a CPU, which has no limit here, writes them to memory).
    """
    shard = model.shard
    size = model.element_bytes
    tokens = block.size
    attention = 6 * model.config.d_model * FLOAT32 + (4 * shard.queries + 4 * shard.keys) * size
    logits = 3 * FLOAT32 * min(tokens, 2048) * shard.vocabulary
    elements = []
    for _, kind in models.kinds(model.config):
        matmuls, others = _mlp_activations(candidate, kind, routed=True)
        elements.append(
            tokens * 2 * others if kind.moe is None else min(tokens, CHUNK) * (matmuls + others)
        )
    rows = 0
    if candidate.exchanges:
        columns = 3 * model.config.d_model + 5 * model.config.moe.expert_width
        rows = model.buffer_rows(block) * columns * size + _returning(model, block)
    return tokens * attention + max(elements) * size + rows + logits
