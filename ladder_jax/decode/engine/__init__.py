"""Continuous batching: requests come and go, each in a slot of one batch that decodes all the time."""

from ladder_jax.decode.engine.board import QueueFull as QueueFull
from ladder_jax.decode.engine.board import Stats as Stats
from ladder_jax.decode.engine.engine import Engine as Engine
from ladder_jax.decode.engine.handle import Handle as Handle
from ladder_jax.decode.engine.request import Finish as Finish
from ladder_jax.decode.engine.request import NoNumbers as NoNumbers
from ladder_jax.decode.engine.request import Piece as Piece
from ladder_jax.decode.engine.request import Request as Request
from ladder_jax.decode.engine.request import Result as Result
