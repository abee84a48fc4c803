"""One example as tokens, with a loss mask: which tokens the model is trained to predict.

    {"messages": [{"role": "user", "content": ...}, ...]}    the assistant's turns, each with its end-of-turn token
    {"prompt": ..., "completion": ...}                       the completion, and the end-of-text token
    {"text": ...}                                            all tokens, and the end-of-text token

An example is tokenized as one text, as in a continued conversation. The loss mask holds each token that overlaps with
the text to predict. The assistant's turns are located by rendering the conversation up to each of them.
"""

import datetime
from collections.abc import Sequence

import numpy as np

from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError

KEYS = (("messages",), ("prompt", "completion"), ("text",))
ASSISTANT = "assistant"

Span = tuple[int, int]  # the characters from begin to end - 1


def render(
    example: dict, *, tokenizer: Tokenizer, where: str, now: datetime.datetime | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32 [n], loss mask bool [n]). Raises UserError for a wrong example. where: begins its message.

    now: the time, for a chat template that asks for it; None: the present.
    """
    kind = next((keys for keys in KEYS if all(key in example for key in keys)), None)
    if kind is None:
        has = ", ".join(map(repr, example)) or "nothing"
        raise UserError(f"{where}: needs 'messages', 'prompt' and 'completion', or 'text': this has {has}")
    try:
        if kind == ("messages",):
            text, spans = _chat(example["messages"], tokenizer, now)
            return _tokens(text, spans, tokenizer, special=False)
        parts = [example[key] for key in kind]
        for key, part in zip(kind, parts):
            if not isinstance(part, str):
                raise UserError(f"{key!r} must be text, not {type(part).__name__}")
        text = "".join(parts)
        tokens, loss_mask = _tokens(text, [(len(text) - len(parts[-1]), len(text))], tokenizer, special=True)
        return _ended(tokens, loss_mask, tokenizer)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _ended(tokens: np.ndarray, loss_mask: np.ndarray, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """With the end-of-text token, to be learnt. Some tokenizers put one around a text by themselves."""
    if not tokenizer.stop_ids:
        return tokens, loss_mask
    if not len(tokens) or tokens[-1] not in tokenizer.stop_ids:
        tokens, loss_mask = np.append(tokens, np.int32(tokenizer.stop_ids[0])), np.append(loss_mask, True)
    loss_mask[-1] = True
    return tokens, loss_mask


def _chat(messages: object, tokenizer: Tokenizer, now: datetime.datetime | None) -> tuple[str, list[Span]]:
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


def _tokens(text: str, spans: Sequence[Span], tokenizer: Tokenizer, *, special: bool) -> tuple[np.ndarray, np.ndarray]:
    tokens, offsets = tokenizer.offsets(text, special=special)
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    loss_mask = np.zeros(len(tokens), bool)
    for begin, end in spans:
        loss_mask |= (begins < end) & (ends > begin)
    return np.array(tokens, np.int32), loss_mask
