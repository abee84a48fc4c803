"""What is asked of an engine, and what it answers. Imports no jax."""

import dataclasses
import enum
import math
import numbers
import operator
import secrets
from collections.abc import Sequence

from ladder_jax.config import DecodeConfig
from ladder_jax.errors import RunFailed, UserError

SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
"""The settings that a request shares with DecodeConfig."""

LARGEST = 1e30  # of temperatures and penalties: far beyond any effect, and a float32 with room around it


class Finish(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # at one of its stop tokens or stop strings
    LENGTH = "length"  # after max_new_tokens
    CANCELLED = "cancelled"


class NoNumbers(RunFailed):
    """A request's logits are NaN or infinite; other requests go on."""

    def __init__(self, after: int):
        super().__init__(
            f"the model's logits are no numbers (NaN or infinite) after {after} new tokens: there is no next one"
        )


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how it is to be continued; sampling settings as in DecodeConfig.

    prompt: token ids, at least one.
    seed: of its noise: the same seed and request give the same text, whatever else runs. None draws a seed, which the
        request then holds: each request has noise of its own.
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
    seed: int | None = None
    stop_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    logprobs: bool = False

    def __post_init__(self):
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(32))
        # All that a request can be wrong in is found here: an error in the engine's loop would be everybody's.
        for name in SAMPLING:
            kind = _whole if name in ("max_new_tokens", "top_k", "seed") else _real
            object.__setattr__(self, name, kind(name, getattr(self, name)))
        DecodeConfig(**{name: getattr(self, name) for name in SAMPLING})
        for name in ("max_new_tokens", "top_k"):
            if getattr(self, name) >= 2**31:
                raise UserError(f"{name} must be below 2**31, not {getattr(self, name)}")
        for name in ("temperature", "repetition_penalty"):
            if getattr(self, name) > LARGEST:
                raise UserError(f"{name} must be at most {LARGEST:g}, not {getattr(self, name)}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(one, str) and one for one in stop):
            raise UserError(f"stop must be strings, none of them empty, not {list(stop)}")
        for name in ("prompt", "stop_ids"):
            object.__setattr__(self, name, tuple(_whole(f"a token of {name}", token) for token in getattr(self, name)))
        object.__setattr__(self, "stop", stop)

    @classmethod
    def of(cls, prompt: Sequence[int], *, config: DecodeConfig, **more) -> "Request":
        """With `config`'s sampling settings."""
        return cls(prompt, **{name: getattr(config, name) for name in SAMPLING}, **more)


def with_seed(config: DecodeConfig, *, index: int) -> DecodeConfig:
    """`config` for one of several requests, each with noise of its own: that at `index` draws with the seed + index."""
    return dataclasses.replace(config, seed=(config.seed + index) % 2**32)


def _whole(name: str, value: object) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(f"{name} must be a whole number, not {value!r}") from None


def _real(name: str, value: object) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise UserError(f"{name} must be a finite number, not {value!r}")
    return float(value)


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
