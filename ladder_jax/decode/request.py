"""A prompt and how it is to be continued, its text as it grows, and the result. Imports no jax."""

import codecs
import dataclasses
import enum
import functools
import operator
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ladder_jax.config import DecodeConfig
from ladder_jax.config.fields import check_type, shown
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import RunFailed, UserError, described

CHOOSING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The settings by which a token is chosen."""
SAMPLING = ("max_new_tokens", *CHOOSING, "seed")
"""The settings that a request shares with DecodeConfig."""

STOP_CHARACTERS = 1000
"""The most that a stop string may have."""

type Decoder = Callable[[Sequence[int]], bytes]
"""The bytes of tokens. The bytes of a sequence are those of its tokens, concatenated."""


class Finish(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # at a stop token or a stop string
    LENGTH = "length"  # after max_new_tokens
    CANCELLED = "cancelled"


class NoNumbers(RunFailed):
    """The logits of one request are NaN or infinite. Other requests go on."""

    def __init__(self, after: int):
        super().__init__(
            f"the model's logits are no numbers (NaN or infinite) after {after} new tokens: there is no next one"
        )


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how it is to be continued; sampling settings as in DecodeConfig.

    prompt: token ids, at least one.
    seed: of the sampling noise. With the same seed a request gives the same text, whatever else
        runs. None draws a seed, which the request then holds.
    stop_ids: tokens that end the text.
    stop: strings that end the text, of at most STOP_CHARACTERS each; they need a decoder.
    logprobs: whether the result holds each token's log-probability, in nats.

    Raises UserError for settings out of their range.
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

    __repr__ = shown

    def __post_init__(self):
        put = functools.partial(object.__setattr__, self)
        if self.seed is None:
            put("seed", secrets.randbits(32))
        # Every setting is checked here: an error in the engine's loop would end all requests.
        checked = DecodeConfig(**{name: getattr(self, name) for name in SAMPLING})
        for name in SAMPLING:
            put(name, getattr(checked, name))
        for name in ("prompt", "stop_ids"):
            tokens = getattr(self, name)
            put(name, whole_numbers(name, tokens))
        put("stop", _strings(self.stop))
        check_type("logprobs", self.logprobs, bool)

    @classmethod
    def of(
        cls, prompt: Sequence[int], *, config: DecodeConfig, index: int = 0, **changes: Any
    ) -> "Request":
        """With `config`'s sampling settings, where `changes` has none; its seed + `index`, for
        noise of its own.
        """
        settings = {name: getattr(config, name) for name in SAMPLING}
        settings["seed"] = (config.seed + index) % 2**32
        return cls(prompt, **{**settings, **changes})

    @property
    def is_greedy(self) -> bool:
        """Whether the greedy program serves it, which neither samples nor computes
        log-probabilities.
        """
        return self.temperature == 0 and not self.logprobs

    def check(self, *, vocab_size: int, decoder: Decoder | None) -> None:
        """Raises UserError where a model of this vocabulary cannot continue the prompt."""
        check_prompts([self.prompt], vocab_size=vocab_size)
        if self.stop and not decoder:
            raise UserError("stop strings need a decoder; stop_ids do not")


def check_decoder(decoder: object) -> None:
    """Raises UserError for what is neither a function nor None."""
    if decoder is not None and not callable(decoder):
        raise UserError(
            f"decoder must be a function from tokens to bytes, not {described(decoder)}"
        )


def ends(
    stop: str | Sequence[str], *, tokenizer: Tokenizer, stop_ids: Sequence[int] | None = None
) -> dict[str, Sequence]:
    """A Request's `stop` and `stop_ids`: a text ends at these strings, and at `stop_ids`, by
    default the tokenizer's. A special token has no text in which its string could be found: it is a
    stop token, too.
    """
    stop = _strings(stop)
    tokens = tokenizer.stop_ids if stop_ids is None else whole_numbers("stop_ids", stop_ids)
    special = [tokenizer.special_ids[one] for one in stop if one in tokenizer.special_ids]
    return dict(stop=stop, stop_ids=(*tokens, *special))


def _strings(stop):
    if not isinstance(stop, Iterable):
        raise UserError(f"stop must be a list, not {described(stop)}")
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(one, str) and one for one in stop):
        raise UserError(f"stop must be strings, none of them empty, not {list(stop)}")
    if (longest := max(map(len, stop), default=0)) > STOP_CHARACTERS:
        raise UserError(f"a stop string may have {STOP_CHARACTERS} characters, not {longest}")
    return stop


def whole_numbers(what: str, tokens: Iterable[int]) -> tuple[int, ...]:
    """As Python's numbers. Raises UserError for anything else, such as a text or 2.0."""
    try:
        return tuple(map(operator.index, tokens))
    except TypeError:
        raise UserError(
            f"{what} must be a list of whole numbers, not {described(tokens)}"
        ) from None


def check_prompts(prompts: Sequence[Sequence[int]], *, vocab_size: int) -> None:
    """Raises UserError where there is no prompt, an empty one, or a token outside the
    vocabulary.
    """
    if not prompts:
        raise UserError("there is no prompt")
    for prompt in prompts:
        if not len(prompt):
            raise UserError(
                "the prompt is empty; generation needs at least one token to start from"
            )
        worst = min(prompt) if min(prompt) < 0 else max(prompt)
        if not 0 <= worst < vocab_size:
            raise UserError(
                f"the prompt holds the token {worst}, outside the model's vocabulary of {vocab_size}"
            )


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a Result, with the same fields. Text may come later than its tokens, never
    earlier.
    """

    tokens: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...] | None

    __repr__ = shown


@dataclasses.dataclass(frozen=True, repr=False)
class Result(Piece):
    """A finished request.

    tokens: all new tokens, up to and including the one that ended the text.
    text: their text, up to the stop token or stop string; None without a decoder.
    logprobs: each token's log-probability, in nats, before temperature and filters; None unless
        requested.
    """

    finish: Finish
    prompt_tokens: int


class TokenSequence:
    """The new tokens of one request, on the host: finds where they end, and which text may be shown
    already.
    """

    def __init__(self, request: Request, *, decoder: Decoder | None):
        self.request = request
        self._decoder = decoder
        self._text = StopText(request.stop)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._shown: list[str] = []

    def take(
        self,
        tokens: Sequence[int] = (),
        logprobs: Sequence[float] | None = None,
        *,
        finish: Finish | None = None,
    ) -> tuple[Piece | None, Result | NoNumbers | None]:
        """Adds the next tokens up to the end of the request. Returns what is new of it, if
        anything, and its outcome.

        logprobs: needed if the request asks for them. finish: ends it as it is, without new tokens.
        The outcome is None where the request goes on, NoNumbers where the device had no logits to
        choose by.
        """
        begin = (len(self._tokens), len(self._shown))
        outcome = None
        for index, token in enumerate(tokens):
            if token < 0:
                outcome = NoNumbers(len(self._tokens))
                break
            self._tokens.append(int(token))
            if self.request.logprobs:
                self._logprobs.append(float(logprobs[index]))
            if finish := self._read(int(token)):
                break
        if finish:
            outcome = self._ended(finish)
        new = self._since(*begin)
        return new if new.tokens or new.text else None, outcome

    def _ended(self, finish):
        """With the text that was held back."""
        if self._decoder:
            self._shown.append(self._text.flush())
        whole = self._since(0, 0)
        prompt = len(self.request.prompt)
        return Result(whole.tokens, whole.text, whole.logprobs, finish, prompt)

    def _since(self, tokens, parts):
        text = "".join(self._shown[parts:]) if self._decoder else None
        logprobs = tuple(self._logprobs[tokens:]) if self.request.logprobs else None
        return Piece(tuple(self._tokens[tokens:]), text, logprobs)

    def _read(self, token):
        if token in self.request.stop_ids:
            return Finish.STOP
        if self._decoder:
            self._shown.append(self._text.push(self._decoder([token])))
        if self._text.stopped:
            return Finish.STOP
        return Finish.LENGTH if len(self._tokens) == self.request.max_new_tokens else None


class StopText:
    """Turns bytes into text that may be shown: whole UTF-8 characters, and no beginning of a stop
    string.

    The text does not depend on how the bytes were cut. Invalid UTF-8 becomes replacement
    characters. Of several stop strings, the first to be complete ends the text; of those complete
    at the same character, the longest.
    """

    def __init__(self, stop: Sequence[str] = ()):
        self._stop = stop
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, data: bytes) -> str:
        """The text that may be shown after these bytes."""
        return self._release(self._utf8.decode(data))

    def flush(self) -> str:
        """The text that was held back, as no more bytes will come."""
        shown = self._release(self._utf8.decode(b"", final=True))
        rest = self._held
        self._held = ""
        return shown + rest

    def _release(self, new):
        if self.stopped:
            return ""
        text = self._held + new
        begins = [(text.find(stop), stop) for stop in self._stop]
        ends = [(begin + len(stop), begin) for begin, stop in begins if begin >= 0]
        if ends:
            _, begin = min(ends)
            self._held = ""
            self.stopped = True
            return text[:begin]
        safe = len(text) - max((_begun(stop, text) for stop in self._stop), default=0)
        self._held = text[safe:]
        return text[:safe]


def _begun(stop, text):
    """How much of `stop`, from its first character, `text` ends with."""
    lengths = range(min(len(stop), len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
