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

SMALL_BODY = 2**17  # bytes
MAX_SPECIAL_TOKEN = 64  # bytes: an upper bound for special tokens, whose text the tokenizer does not give


@dataclasses.dataclass(frozen=True)
class Service:
    """engine: runs in its own thread, with the tokenizer's bytes as its decoder.

    name: the model's name in the API. key: the API key; None if clients need none.
    hosts: the names allowed in `Host` and `Origin`; None for any. large_bodies: held while a large body is handled.
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
    large_bodies: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(1))

    async def in_thread[T](self, size: int, work: Callable[[], T]) -> T:
        """Runs `work`, for a body of `size` bytes, in a thread, and returns its result.

        Large bodies are handled one at a time, so that small ones get threads and Python's lock.
        """
        if size <= SMALL_BODY:
            return await asyncio.to_thread(work)
        async with self.large_bodies:
            return await asyncio.to_thread(work)

    def prepare(self) -> None:
        """Computes `max_characters` in advance, so that the first request does not wait for it."""
        _ = self.max_characters

    @functools.cached_property
    def max_characters(self) -> int:
        """An upper bound for the characters in `engine.capacity` tokens. Longer texts are refused untokenized."""
        longest = max(len(self.tokenizer.to_bytes([token])) for token in range(self.tokenizer.vocab_size))
        return self.engine.capacity * max(longest, MAX_SPECIAL_TOKEN)
