"""What exchanged experts take of a training step's memory and time, on one device.

Of its own tokens a device sends E S rows, full slots or not, and its experts compute as many (`shards.buffer_rows`).
For the backward pass a layer keeps

    none           the rows that its experts read, their products and activations, and in float32 the rows that return
    save-matmuls   the rows that its experts read, gate and up, and the rows that return
    full, offload  none of them: both all-to-alls are repeated

and, if the next attention hides the rows' way back, the experts' outputs, with which that layer begins.
"""

from ladder_jax import residual
from ladder_jax.config import ModelConfig, Remat
from ladder_jax.plan.candidate import Candidate
from ladder_jax.plan.request import FLOAT32, Request, size_of
from ladder_jax.residual import Step
from ladder_jax.schedule import shards


def rows(candidate: Candidate, *, request: Request) -> int:
    """Rows of a device's buffers."""
    return shards.buffer_rows(request.config.moe, tokens=_own(candidate, request=request), ranks=candidate.mesh.tensor)


def sent(candidate: Candidate, *, request: Request) -> int:
    """Bytes of a device's buffers."""
    return rows(candidate, request=request) * request.config.d_model * size_of(request.config.dtype)


def kept(candidate: Candidate, *, request: Request) -> int:
    """Bytes of a layer's routed experts that are kept, without the layer's input."""
    config, count = request.config, rows(candidate, request=request)
    stream, width = config.d_model * size_of(config.dtype), config.moe.expert_width * size_of(config.dtype)
    returning = _own(candidate, request=request) * config.moe.top_k * config.d_model * FLOAT32
    return {
        Remat.NONE: count * (stream + 5 * width) + returning,
        Remat.SAVE_MATMULS: count * (2 * stream + 2 * width),
    }.get(candidate.remat, 0)


def entering(step: Step, candidate: Candidate, *, request: Request) -> int:
    """Bytes of the rows with which a layer begins whose first step is `step`, that are kept."""
    begins = step.delay > 0 and candidate.remat in (Remat.FULL, Remat.OFFLOAD)
    return sent(candidate, request=request) if begins else 0


def working(candidate: Candidate, *, request: Request) -> int:
    """Bytes of one layer's temporaries, forward and backward."""
    config, count = request.config, rows(candidate, request=request)
    width, returning = 5 * config.moe.expert_width, _own(candidate, request=request) * config.moe.top_k
    stream = config.d_model * (3 * count * size_of(config.dtype) + returning * FLOAT32)
    return count * width * size_of(config.dtype) + stream


def products(candidate: Candidate, *, request: Request) -> tuple[float, int]:
    """Multiplications of a layer's experts, forward: of all slots, of the router for a device's own tokens, and of the
    shared expert; and the columns that it projects back without being computed again, which are the shared expert's."""
    moe, d_model, ranks = request.config.moe, request.config.d_model, candidate.mesh.tensor
    shared = moe.shared_width // ranks
    routed = 3 * rows(candidate, request=request) * moe.expert_width + _own(candidate, request=request) * moe.experts
    return d_model * (routed + 3 * candidate.rows * request.sequence * shared), shared


def reductions(step: Step, config: ModelConfig) -> float:
    """Gathers and reduce-scatters of a step, as a share of two: attention's, or a shared expert's, whose sum farskip
    adds to attention's."""
    if 0 in step.sublayers:
        return 1.0
    return 0.0 if not config.moe.shared_width else 0.5 if step.early else 1.0


def seconds(candidate: Candidate, *, request: Request, all_to_all: float, flops: float) -> tuple[float, float]:
    """Seconds of a microbatch's all-to-alls that sublayers can hide, and of those that they wait for.

    A layer has two forward and two backward, and two more where they are repeated. In a standard layer they stand
    beside the shared expert. all_to_all: seconds of one. flops: that a device computes a second.
    """
    config, repeats = request.config, candidate.remat in (Remat.FULL, Remat.OFFLOAD)
    steps = [step for layer in residual.of_model(config).layers for step in layer if 0 not in step.sublayers]
    delays = [step.delay for step in steps if step.reduces]
    tokens, shared = candidate.rows * request.sequence, config.moe.shared_width // candidate.mesh.tensor
    forward = 2 * tokens * 3 * config.d_model * shared / flops
    each = (6 if repeats else 4) * all_to_all
    waiting = max(0.0, each - (4 if repeats else 3) * forward)
    hiding = sum(delay > 0 for delay in delays)
    return hiding * each, (len(delays) - hiding) * waiting


def _own(candidate: Candidate, *, request: Request) -> int:
    """A device's own tokens in a microbatch."""
    return candidate.rows * request.sequence // candidate.mesh.tensor
