"""What is asked of an engine, and what it answers. Imports no jax."""

import dataclasses
import enum
import math
from collections.abc import Sequence

from ladder_jax.config import DecodeConfig
from ladder_jax.errors import UserError

SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
"""The settings that a request shares with DecodeConfig."""


class Finish(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # at one of its stop tokens or stop strings
    LENGTH = "length"  # after max_new_tokens
    CANCELLED = "cancelled"


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how it is to be continued; sampling settings as in DecodeConfig.

    prompt: token ids, at least one.
    stop_ids: tokens that end the text.
    stop: strings that end the text, for an engine that has a decoder.
    logprobs: whether the answer holds each token's log-probability, in nats.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    logprobs: bool = False

    def __post_init__(self):
        # All that a request can be wrong in is found here: an error in the engine's loop would be everybody's.
        DecodeConfig(**{name: getattr(self, name) for name in SAMPLING})
        if not (math.isfinite(self.temperature) and math.isfinite(self.repetition_penalty)):
            raise UserError("temperature and repetition_penalty must be finite")
        if self.top_k >= 2**31:
            raise UserError(f"top_k must be below 2**31, not {self.top_k}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(one, str) and one for one in stop):
            raise UserError(f"stop must be strings, none of them empty, not {list(stop)}")
        object.__setattr__(self, "prompt", tuple(map(int, self.prompt)))
        object.__setattr__(self, "stop_ids", tuple(map(int, self.stop_ids)))
        object.__setattr__(self, "stop", stop)

    @classmethod
    def of(cls, prompt: Sequence[int], *, config: DecodeConfig, **more) -> "Request":
        """With `config`'s sampling settings."""
        return cls(prompt, **{name: getattr(config, name) for name in SAMPLING}, **more)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What came in one round: a Result's fields, in parts. Text may come later than its tokens, never earlier."""

    tokens: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...] | None


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished request.

    tokens: all that were made, up to and including the one that stopped it.
    text: theirs, which ends before the stop token or stop string; None without a decoder.
    logprobs: each token's log-probability, in nats, before temperature and cuts; None unless asked for.
    """

    tokens: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...] | None
    finish: Finish
    prompt_tokens: int
