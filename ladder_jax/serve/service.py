"""What the paths of one server share."""

import dataclasses
import time

from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode.engine import Engine
from ladder_jax.serve.drain import Drain
from ladder_jax.serve.limits import Limits
from ladder_jax.serve.metrics import Metrics


@dataclasses.dataclass(frozen=True)
class Service:
    """engine: with the tokenizer's bytes as its decoder, and a thread that drives it.

    name: the model's, as clients must give it; key: the API key, if they need one.
    """

    engine: Engine
    tokenizer: Tokenizer
    name: str
    limits: Limits
    metrics: Metrics
    key: str | None = None
    drain: Drain = dataclasses.field(default_factory=Drain)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
