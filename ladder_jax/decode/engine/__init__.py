"""Continuous batching: many requests share one batch; each gets a free slot of it and leaves when
it has finished.
"""

from ladder_jax.decode.engine.engine import Engine as Engine
from ladder_jax.decode.engine.handle import Handle as Handle
from ladder_jax.decode.engine.handle import QueueFull as QueueFull
from ladder_jax.decode.engine.handle import Stats as Stats
from ladder_jax.decode.request import Finish as Finish
from ladder_jax.decode.request import NoNumbers as NoNumbers
from ladder_jax.decode.request import Piece as Piece
from ladder_jax.decode.request import Request as Request
from ladder_jax.decode.request import Result as Result
