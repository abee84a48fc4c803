"""The JSON of answers: whole, and as a stream's events."""

import codecs
import collections
import time
import uuid
from collections.abc import Iterator, Sequence

from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode.engine import Piece, Result
from ladder_jax.serve.schema import GenerationBody

MIN_LOGPROB = -9999.0
"""OpenAI's value for impossible tokens: JSON has no infinity."""


class Form:
    """Answers to `prompts`, each of them `body.answers` times, in this order.

    name: of the request, in the answers' ids.

    A kind of answer has a `prefix` of these ids; the value of `object` in a `whole` answer, and in
    a `part` of a stream; what a choice says as a whole (`_said`), when it begins (`_begun`, None
    for nothing), and when it goes on (`_continued`) with a text, or ends without one; and
    log-probabilities.
    """

    prefix: str
    whole: str
    part: str

    def __init__(
        self, body: GenerationBody, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ):
        self.body = body
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.name = uuid.uuid4().hex
        self._created = int(time.time())
        options = body.stream_options
        self._counts = bool(options and options.include_usage)

    def answer(self, results: Sequence[Result]) -> dict:
        choices = [
            self._choice(index, self._said(index, result), result, result.finish)
            for index, result in enumerate(results)
        ]
        return {**self._head(self.whole), "choices": choices, "usage": self._usage(results)}

    def opening(self) -> Iterator[dict]:
        """The events before the first piece."""
        for index in range(len(self.prompts) * self.body.answers):
            if said := self._begun(index):
                yield self._event(self._choice(index, said))

    def event(self, index: int, output: Piece | Result) -> dict:
        """Of a piece, or of the end of a choice."""
        if isinstance(output, Result):
            return self._event(self._choice(index, self._continued(None), reason=output.finish))
        return self._event(self._choice(index, self._continued(output.text), output))

    def closing(self, results: Sequence[Result]) -> Iterator[dict]:
        """The token counts, if they are asked for."""
        if self._counts:
            yield {**self._head(self.part), "choices": [], "usage": self._usage(results)}

    def _event(self, choice: dict) -> dict:
        usage = {"usage": None} if self._counts else {}
        return {**self._head(self.part), "choices": [choice], **usage}

    def _head(self, kind: str) -> dict:
        return {
            "id": f"{self.prefix}-{self.name}",
            "object": kind,
            "created": self._created,
            "model": self.body.model,
        }

    def _usage(self, results: Sequence[Result]) -> dict[str, int]:
        """A prompt counts once."""
        prompt = sum(map(len, self.prompts))
        new = sum(len(result.tokens) for result in results)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _choice(
        self,
        index: int,
        said: dict,
        output: Piece | Result | None = None,
        reason: str | None = None,
    ) -> dict:
        has_logprobs = output is not None and output.logprobs is not None
        logprobs = self._logprobs(index, output) if has_logprobs else None
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}


class CompletionForm(Form):
    prefix = "cmpl"
    whole = "text_completion"
    part = "text_completion"

    def __init__(self, *about):
        super().__init__(*about)
        self._offsets = collections.defaultdict(_Offsets)

    def _said(self, index: int, result: Result) -> dict:
        return {"text": self._echo(index) + result.text}

    def _begun(self, index: int) -> dict | None:
        return {"text": self._echo(index)} if self.body.echo else None

    def _continued(self, text: str | None) -> dict:
        return {"text": text or ""}

    def _echo(self, index: int) -> str:
        if not self.body.echo:
            return ""
        return self.tokenizer.decode(self.prompts[index // self.body.answers])

    def _logprobs(self, index: int, output: Piece | Result) -> dict:
        """Token offsets count from the answer's first piece on."""
        at = _Offsets() if isinstance(output, Result) else self._offsets[index]
        pieces = [self.tokenizer.to_bytes([token]) for token in output.tokens]
        words = [_token_text(piece) for piece in pieces]
        values = [max(value, MIN_LOGPROB) for value in output.logprobs]
        top = [{word: value} for word, value in zip(words, values)] if self.body.logprobs else None
        offsets = [at.next(piece) for piece in pieces]
        return {
            "tokens": words,
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": offsets,
        }


class ChatForm(Form):
    prefix = "chatcmpl"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def _said(self, index: int, result: Result) -> dict:
        return {"message": {"role": "assistant", "content": result.text, "refusal": None}}

    def _begun(self, index: int) -> dict:
        return {"delta": {"role": "assistant", "content": ""}}

    def _continued(self, text: str | None) -> dict:
        return {"delta": {} if text is None else {"content": text}}

    def _logprobs(self, index: int, output: Piece | Result) -> dict:
        content = []
        for token, logprob in zip(output.tokens, output.logprobs):
            data = self.tokenizer.to_bytes([token])
            entry = {
                "token": _token_text(data),
                "logprob": max(logprob, MIN_LOGPROB),
                "bytes": list(data),
            }
            top = [entry] if self.body.top_logprobs else []
            content.append({**entry, "top_logprobs": top})
        return {"content": content, "refusal": None}


def _token_text(data: bytes) -> str:
    """A token's text. If it is only a part of a character, its bytes as OpenAI writes them:
    `bytes:\\xc3`.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class _Offsets:
    """Where each token begins in a text of which tokens may be parts of characters: the character
    that holds its first byte.
    """

    def __init__(self):
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def next(self, piece: bytes) -> int:
        self._characters += len(self._utf8.decode(piece[:1]))
        unfinished, _ = self._utf8.getstate()
        begin = self._characters - bool(piece and not unfinished)
        self._characters += len(self._utf8.decode(piece[1:]))
        return begin
