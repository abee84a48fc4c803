"""The state that all paths of one server share."""

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
LONG_TOKEN = 64  # bytes: a bound for special tokens, whose text the tokenizer does not give


@dataclasses.dataclass(frozen=True)
class Service:
    """engine: with the tokenizer's bytes as its decoder, driven by its own thread.

    name: the model's, as clients must give it. key: the API key, None if they need none.
    hosts: the names that `Host` and `Origin` may have; None for any.
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
        """The result of `work`, run in a thread, for a body of `size` bytes.

        Large bodies are handled one at a time, which leaves threads and Python's lock to small ones.
        """
        if size <= SMALL:
            return await asyncio.to_thread(work)
        async with self.large:
            return await asyncio.to_thread(work)

    def prepare(self) -> None:
        """Computes in advance what the first request would have to wait for."""
        _ = self.most_text

    @functools.cached_property
    def most_text(self) -> int:
        """The most characters that the engine's capacity of tokens can hold: a longer text need not be tokenized."""
        longest = max(len(self.tokenizer.to_bytes([token])) for token in range(self.tokenizer.vocab_size))
        return self.engine.capacity * max(longest, LONG_TOKEN)
