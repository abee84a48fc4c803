"""Continuous batching: many requests share one batch; each gets a free slot of it and leaves when
it has finished.
"""

from ladder_jax.decode.engine.engine import Engine as Engine
from ladder_jax.decode.engine.handle import Handle as Handle, QueueFull as QueueFull, Stats as Stats
from ladder_jax.decode.request import (
    Finish as Finish,
    NoNumbers as NoNumbers,
    Piece as Piece,
    Request as Request,
    Result as Result,
)
