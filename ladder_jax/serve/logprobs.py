"""Log-probabilities of tokens, in nats, in the JSON of completions and chat."""

import codecs
from collections.abc import Sequence

from ladder_jax.data.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI's value for impossible tokens: JSON has no infinity


def token_text(data: bytes) -> str:
    """A token's text. If it is only a part of a character, its bytes as OpenAI writes them: `bytes:\\xc3`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokens: Sequence[int], logprobs: Sequence[float], *, tokenizer: Tokenizer, top: int) -> dict:
    content = []
    for token, logprob in zip(tokens, logprobs):
        data = tokenizer.to_bytes([token])
        entry = {"token": token_text(data), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(data)}
        content.append({**entry, "top_logprobs": [entry][:top]})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Log-probabilities of a completion, called once for each piece. Token offsets count from the first piece on."""

    def __init__(self, *, tokenizer: Tokenizer, top: int):
        self._tokenizer, self._top = tokenizer, top
        self._utf8 = _utf8()
        self._characters = 0

    def __call__(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict:
        pieces = [self._tokenizer.to_bytes([token]) for token in tokens]
        words, values = [token_text(piece) for piece in pieces], [max(value, MIN_LOGPROB) for value in logprobs]
        top = [{word: value} for word, value in zip(words, values)] if self._top else None
        offsets = [self._offset(piece) for piece in pieces]
        return {"tokens": words, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}

    def _offset(self, piece: bytes) -> int:
        before = self._characters
        self._characters += len(self._utf8.decode(piece))
        # Counted from the end: the decoder may also have output an invalid character of earlier tokens.
        return max(before, self._characters - len(_utf8().decode(piece)))


def _utf8() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")
