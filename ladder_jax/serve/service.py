"""What the paths of one server share."""

import asyncio
import dataclasses
import functools
import time
from collections.abc import Callable

from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode.engine import Engine
from ladder_jax.serve.drain import Drain
from ladder_jax.serve.limits import Limits
from ladder_jax.serve.metrics import Metrics

SMALL = 2**17  # bytes of a body
LONG_TOKEN = 64  # bytes: special tokens may be as long, and their text is not told


@dataclasses.dataclass(frozen=True)
class Service:
    """engine: with the tokenizer's bytes as its decoder, and a thread that drives it.

    name: the model's, as clients must give it; key: the API key, if they need one.
    hosts: what clients must call the server in `Host` and `Origin`; None for anything.
    """

    engine: Engine
    tokenizer: Tokenizer
    name: str
    limits: Limits
    metrics: Metrics
    key: str | None = None
    hosts: frozenset[str] | None = None
    drain: Drain = dataclasses.field(default_factory=Drain)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    large: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(1))

    async def aside[T](self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, done in a thread for a body of `size` bytes.

        What is large is done one after another: threads, and Python's lock, are left for what is small.
        """
        if size <= SMALL:
            return await asyncio.to_thread(work)
        async with self.large:
            return await asyncio.to_thread(work)

    def prepare(self) -> None:
        """What the first request would have to wait for."""
        _ = self.most_text

    @functools.cached_property
    def most_text(self) -> int:
        """Characters that the engine's capacity of tokens could stand for: more need not be cut into tokens."""
        longest = max(len(self.tokenizer.to_bytes([token])) for token in range(self.tokenizer.vocab_size))
        return self.engine.capacity * max(longest, LONG_TOKEN)
