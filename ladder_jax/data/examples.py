"""Examples in JSON lines, each as tokens with a loss mask: which tokens the model is trained to
predict.

    {"messages": [{"role": "user", "content": ...}, ...]}    the assistant's turns, each with its end-of-turn token
    {"prompt": ..., "completion": ...}                       the completion, and the end-of-text token
    {"text": ...}                                            all tokens, and the end-of-text token

An example is tokenized as one text, as in a continued conversation. The loss mask holds each token
that overlaps with the text to predict. The assistant's turns are located by rendering the
conversation up to each of them.
"""

import dataclasses
import datetime
import hashlib
import pathlib
from collections.abc import Iterator

import numpy as np

from ladder_jax.data import json_lines
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError
from ladder_jax.files import below

KEYS = (("prompt", "completion"), ("text",))
ASSISTANT = "assistant"

Spans = list[tuple[int, int]]
"""Each the characters from begin to end - 1."""
Masked = tuple[np.ndarray, np.ndarray]
"""Tokens, int32 [n], and the loss mask, bool [n]."""


@dataclasses.dataclass(frozen=True)
class Examples:
    """tokens: int32 [n], of all examples. loss_mask: bool [n]. starts: int64 [examples + 1], the
    last is n.

    cut: the number of examples that were longer than a row and lost their end.
    left_out: the number of examples without any token to predict within a row.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    starts: np.ndarray
    cut: int
    left_out: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, start: int, count: int) -> np.ndarray:
        return self.tokens[start : start + count]

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(b"examples")
        for array in (self.tokens, self.loss_mask, self.starts):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def summary(self) -> str:
        predicted = f"of which {self.loss_mask.mean():.0%} are predicted"
        parts = [f"{len(self):,} examples of {len(self.tokens):,} tokens, {predicted}"]
        parts += [f"{self.cut:,} were cut at a row's end"] if self.cut else []
        parts += (
            [f"{self.left_out:,} left out, with no token to predict in a row"]
            if self.left_out
            else []
        )
        return "; ".join(parts)


def load(
    path: str, *, tokenizer: Tokenizer, length: int, now: datetime.datetime | None = None
) -> Examples:
    """The examples at `path`, each cut to a row of `length` + 1 tokens.

    now: the time of all, for a chat template that asks for it; None: the present.
    All are held in memory, at 5 bytes per token. Raises UserError for a wrong example, and for
    fewer than two.
    """
    now = now or datetime.datetime.now()
    tokens = []
    masks = []
    cut = 0
    left_out = 0
    for where, example in read(path):
        row, mask = render(example, tokenizer=tokenizer, where=where, now=now)
        if mask[1 : length + 1].any():
            tokens.append(row[: length + 1])
            masks.append(mask[: length + 1])
            cut += len(row) > length + 1
        else:
            left_out += 1
    if len(tokens) < 2:
        raise UserError(
            f"data.path={path!r} has {len(tokens)} examples with tokens to predict; it needs two, as one is held out"
        )
    starts = np.cumsum([0, *map(len, tokens)])
    return Examples(np.concatenate(tokens), np.concatenate(masks), starts, cut, left_out)


def read(path: str) -> Iterator[tuple[str, dict]]:
    """Yields ("FILE:LINE", object) of a file, or of a folder's files in the order of their paths.
    Skips empty lines.

    Raises UserError if `path` does not exist or cannot be read, and for a line that is not a JSON
    object.
    """
    root = pathlib.Path(path).expanduser()
    if not root.exists():
        raise UserError(
            f"data.path={path!r} does not exist (a JSON lines file, or a folder of them)"
        )
    files = [file for file in below(root) if file == root or file.name.endswith(json_lines.ENDINGS)]
    if not files:
        raise UserError(
            f"data.path={path!r} holds no file that ends in {', '.join(json_lines.ENDINGS)}"
        )
    for file in files:
        for number, value in json_lines.read(file):
            if not isinstance(value, dict):
                raise UserError(f"{file}:{number}: not a JSON object but {type(value).__name__}")
            yield f"{file}:{number}", value


def render(
    example: dict, *, tokenizer: Tokenizer, where: str, now: datetime.datetime | None = None
) -> Masked:
    """The example's tokens and their mask. Raises UserError for a wrong example. where: begins its
    message.

    now: the time, for a chat template that asks for it; None: the present.
    """
    try:
        if "messages" in example:
            text, spans = _chat(example["messages"], tokenizer, now)
            return _tokens(text, spans, tokenizer, special=False)
        keys = next((keys for keys in KEYS if all(key in example for key in keys)), None)
        if keys is None:
            has = ", ".join(map(repr, example)) or "nothing"
            raise UserError(
                f"needs 'messages', 'prompt' and 'completion', or 'text': this has {has}"
            )
        for key in keys:
            if not isinstance(example[key], str):
                raise UserError(f"{key!r} must be text, not {type(example[key]).__name__}")
        text = "".join(example[key] for key in keys)
        begin = len(text) - len(example[keys[-1]])
        return _ended(*_tokens(text, [(begin, len(text))], tokenizer, special=True), tokenizer)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _ended(tokens: np.ndarray, loss_mask: np.ndarray, tokenizer: Tokenizer) -> Masked:
    """With the end-of-text token, to be learnt. Some tokenizers put one around a text by
    themselves.
    """
    if not tokenizer.stop_ids:
        return tokens, loss_mask
    if not len(tokens) or tokens[-1] not in tokenizer.stop_ids:
        tokens = np.append(tokens, np.int32(tokenizer.stop_ids[0]))
        loss_mask = np.append(loss_mask, True)
    loss_mask[-1] = True
    return tokens, loss_mask


def _chat(
    messages: object, tokenizer: Tokenizer, now: datetime.datetime | None
) -> tuple[str, Spans]:
    """The rendered conversation, and the spans of the assistant's turns."""
    if not isinstance(messages, list) or not messages:
        raise UserError("'messages' must be a list of messages")
    text = tokenizer.render(messages, prompt=False, now=now)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = tokenizer.render(messages[:index], prompt=True, now=now)
        after = tokenizer.render(messages[: index + 1], prompt=False, now=now)
        if not (after.startswith(before) and text.startswith(after.rstrip())):
            raise UserError(
                "the chat template changes earlier turns when more follow: write one assistant turn per example"
            )
        spans.append((len(before), len(after.rstrip())))
    if not spans:
        raise UserError("no message has the role 'assistant', so there is nothing to learn")
    return text, spans


def _tokens(text: str, spans: Spans, tokenizer: Tokenizer, *, special: bool) -> Masked:
    tokens, offsets = tokenizer.offsets(text, special=special)
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    loss_mask = np.zeros(len(tokens), bool)
    for begin, end in spans:
        loss_mask |= (begins < end) & (ends > begin)
    return np.array(tokens, np.int32), loss_mask
