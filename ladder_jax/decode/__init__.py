"""Inference: the key/value cache, compiled prefill and decode steps, sampling, generation,
continuous batching.
"""

from ladder_jax.decode.engine import Engine as Engine
from ladder_jax.decode.engine import Handle as Handle
from ladder_jax.decode.engine import QueueFull as QueueFull
from ladder_jax.decode.generate import Generator as Generator
from ladder_jax.decode.generate import default_tensor as default_tensor
from ladder_jax.decode.request import Finish as Finish
from ladder_jax.decode.request import NoNumbers as NoNumbers
from ladder_jax.decode.request import Request as Request
from ladder_jax.decode.request import Result as Result
from ladder_jax.decode.request import check_prompts as check_prompts
from ladder_jax.decode.sampling import Choice as Choice
from ladder_jax.decode.sampling import Settings as Settings
from ladder_jax.decode.steps import decode_many as decode_many
from ladder_jax.decode.steps import extend as extend
from ladder_jax.decode.steps import prefill as prefill
from ladder_jax.decode.steps import prefill_in_chunks as prefill_in_chunks
from ladder_jax.decode.steps import sample_first as sample_first
from ladder_jax.decode.steps import seen_in as seen_in
