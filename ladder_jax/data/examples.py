"""Examples in JSON lines, each as tokens with a loss mask: which tokens the model is trained to
predict.

    {"messages": [{"role": "user", "content": ...}, ...]}    the assistant's turns, each with its end-of-turn token,
                                                             but those with "weight": 0
    {"prompt": ..., "completion": ...}                       the completion, and the end-of-text token
    {"text": ...}                                            all tokens, and the end-of-text token

An example is tokenized as one text, as in a continued conversation. The loss mask holds each token
that overlaps with the text to predict. The assistant's turns are located by rendering the
conversation up to each of them.
"""

import dataclasses
import datetime
import hashlib
from collections.abc import Iterator

import numpy as np

from ladder_jax.data import json_lines
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError
from ladder_jax.files import below, local_path

KEYS = (("prompt", "completion"), ("text",))
ASSISTANT = "assistant"

Spans = list[tuple[int, int]]
"""Each the characters from begin to end - 1."""
Masked = tuple[np.ndarray, np.ndarray]
"""Tokens, int32 [n], and the loss mask, bool [n]."""


@dataclasses.dataclass(frozen=True)
class Examples:
    """tokens: int32 [n], of all examples. loss_mask: bool [n]. starts: int64 [examples + 1], the
    last is n. summary: a line for the user.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    starts: np.ndarray
    summary: str

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, start: int, count: int) -> np.ndarray:
        return self.tokens[start : start + count]

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(b"examples")
        for array in (self.tokens, self.loss_mask, self.starts):
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]


def load(
    path: str, *, tokenizer: Tokenizer, length: int, now: datetime.datetime | None = None
) -> Examples:
    """The examples at `path`, each cut to a row of `length` + 1 tokens.

    now: the time of all, for a chat template that asks for it; None: the present.
    All are held in memory, at 5 bytes per token. Raises UserError for a wrong example, and for
    fewer than two.
    """
    now = now or datetime.datetime.now()
    size = length + 1
    kept = []
    cut = 0
    left_out = 0
    for where, example in read(path):
        row, mask = render(example, tokenizer=tokenizer, where=where, now=now)
        if not mask[1:size].any():
            left_out += 1
            continue
        kept.append((row[:size], mask[:size]))
        if len(row) > size:
            cut += 1
    if len(kept) < 2:
        raise UserError(
            f"data.path={path!r} has {len(kept)} examples with tokens to predict; it needs two, as one is held out"
        )
    tokens, loss_mask = (np.concatenate(rows) for rows in zip(*kept))
    summary = (
        f"{len(kept):,} examples of {len(tokens):,} tokens, of which {loss_mask.mean():.0%} are predicted;"
        f" {cut:,} were cut at a row's end; {left_out:,} left out, with no token to predict in a row"
    )
    starts = np.cumsum([0, *(len(row) for row, _ in kept)])
    return Examples(tokens, loss_mask, starts, summary)


def read(path: str) -> Iterator[tuple[str, dict]]:
    """Yields ("FILE:LINE", object) of a file, or of a folder's files in the order of their paths.
    Skips empty lines.

    Raises UserError if `path` does not exist or cannot be read, and for a line that is not a JSON
    object.
    """
    root = local_path(path)
    if not root.exists():
        raise UserError(
            f"data.path={path!r} does not exist (a JSON lines file, or a folder of them)"
        )
    files = below(root, data=True)
    if root.is_dir():
        files = [file for file in files if file.name.lower().endswith(json_lines.ENDINGS)]
    if not files:
        raise UserError(
            f"data.path={path!r} holds no file that ends in {', '.join(json_lines.ENDINGS)}"
        )
    for file in files:
        for number, value in json_lines.read(file):
            where = f"{file}:{number}"
            if not isinstance(value, dict):
                raise UserError(f"{where}: not a JSON object but {type(value).__name__}")
            yield where, value


def render(
    example: dict, *, tokenizer: Tokenizer, where: str, now: datetime.datetime | None = None
) -> Masked:
    """The example's tokens and their mask. Raises UserError for a wrong example. where: begins its
    message.

    now: the time, for a chat template that asks for it; None: the present.
    """
    try:
        if "messages" in example:
            if example.get("tools"):
                raise UserError("chat templates are not told of 'tools': write them into a message")
            text, spans = _chat(example["messages"], tokenizer, now)
            return _tokens(text, spans, tokenizer, special=False)
        keys = next((keys for keys in KEYS if example.keys() >= set(keys)), None)
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
        tokens, loss_mask = _tokens(text, [(begin, len(text))], tokenizer, special=True)
        return _ended(tokens, loss_mask, tokenizer)
    except (UserError, UnicodeEncodeError) as error:
        raise UserError(f"{where}: {error}") from None


def _ended(tokens: np.ndarray, loss_mask: np.ndarray, tokenizer: Tokenizer) -> Masked:
    """With the end-of-text token, to be learnt. Some tokenizers put one around a text by
    themselves.
    """
    stop_ids = tokenizer.stop_ids
    if not stop_ids:
        return tokens, loss_mask
    if not len(tokens) or tokens[-1] not in stop_ids:
        tokens = np.append(tokens, np.int32(stop_ids[0]))
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
        if message["role"] != ASSISTANT or message.get("weight") == 0:
            continue
        before = tokenizer.render(messages[:index], prompt=True, now=now)
        after = tokenizer.render(messages[: index + 1], prompt=False, now=now)
        until = after.rstrip()
        if not after.startswith(before) or not text.startswith(until):
            raise UserError(
                "the chat template changes earlier turns when more follow, or begins an answer otherwise than it asks"
                " for one: write one assistant turn per example, or edit the template"
            )
        spans.append((len(before), len(until)))
    if not spans:
        raise UserError(
            "no message has the role 'assistant', or each such message has the weight 0: there is nothing to learn"
        )
    return text, spans


def _tokens(text: str, spans: Spans, tokenizer: Tokenizer, *, special: bool) -> Masked:
    tokens, offsets = tokenizer.offsets(text, special=special)
    offsets = np.array(offsets, np.int64)
    begins, ends = offsets.reshape(-1, 2).T
    # a token's spaces are its own: some tokenizers (trim_offsets) leave them out
    begins = np.minimum(begins, np.maximum.accumulate([0, *ends])[:-1])
    loss_mask = np.zeros(len(tokens), bool)
    for begin, end in spans:
        overlaps = (begins < end) & (ends > begin)
        loss_mask |= overlaps
    return np.array(tokens, np.int32), loss_mask
