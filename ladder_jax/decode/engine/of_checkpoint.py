"""An engine for a checkpoint."""

from ladder_jax import nn, parallel
from ladder_jax.checkpoint import Checkpoint, Pieces
from ladder_jax.config import DecodeConfig
from ladder_jax.decode.engine.engine import Engine
from ladder_jax.decode.generate import default_tensor
from ladder_jax.decode.request import Decoder
from ladder_jax.decode.steps import CHUNK


def of_checkpoint(
    saved: Checkpoint,
    *,
    settings: DecodeConfig,
    tensor: int | None,
    slots: int,
    capacity: int,
    max_queue: int,
    chunk: int = CHUNK,
    decoder: Decoder,
) -> Engine:
    """On `tensor` devices; by default on as many as the model was trained on, if this machine has as many.

    settings: loop, launch, quantize and prefill_chunk. The rest as in Engine.
    """
    definition = nn.define(saved.config.model, mesh=parallel.make_mesh(tensor=tensor or default_tensor(saved.config)))
    return Engine(
        definition,
        Pieces(saved, definition),
        slots=slots,
        capacity=capacity,
        max_queue=max_queue,
        chunk=chunk,
        decoder=decoder,
        launch=settings.launch,
        prefill_chunk=settings.prefill_chunk,
        loop=settings.loop,
        quantize=settings.quantize,
    )
