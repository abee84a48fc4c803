"""Inference: the key/value cache, compiled prefill and decode steps, sampling, generation,
continuous batching.
"""

from ladder_jax.decode.engine import Engine as Engine, Handle as Handle, QueueFull as QueueFull
from ladder_jax.decode.generate import Generator as Generator, default_tensor as default_tensor
from ladder_jax.decode.request import (
    Finish as Finish,
    NoNumbers as NoNumbers,
    Request as Request,
    Result as Result,
    check_prompts as check_prompts,
)
from ladder_jax.decode.sampling import Choice as Choice, Settings as Settings
from ladder_jax.decode.steps import (
    decode_many as decode_many,
    extend as extend,
    prefill as prefill,
    prefill_in_chunks as prefill_in_chunks,
    sample_first as sample_first,
    seen_in as seen_in,
)
