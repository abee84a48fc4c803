"""From a checkpoint to an engine."""

from ladder_jax import nn, parallel
from ladder_jax.checkpoint import Checkpoint, Pieces
from ladder_jax.config import DecodeConfig
from ladder_jax.decode import memory
from ladder_jax.decode.engine.engine import Engine
from ladder_jax.decode.engine.task import Decoder
from ladder_jax.decode.generate import default_tensor


def of_checkpoint(
    saved: Checkpoint,
    *,
    settings: DecodeConfig,
    tensor: int | None,
    slots: int,
    capacity: int,
    max_queue: int,
    decoder: Decoder,
) -> Engine:
    """As `settings` says how to compute; on `tensor` devices, or as many as it was trained on where there are."""
    definition = nn.define(saved.config.model, mesh=parallel.make_mesh(tensor=tensor or default_tensor(saved.config)))
    form = dict(loop=settings.loop, quantize=settings.quantize)
    memory.check_slots(definition, slots=slots, positions=capacity, **form)  # before the weights are read
    return Engine(
        definition,
        Pieces(saved, definition),
        slots=slots,
        capacity=capacity,
        max_queue=max_queue,
        decoder=decoder,
        launch=settings.launch,
        prefill_chunk=settings.prefill_chunk,
        **form,
    )
