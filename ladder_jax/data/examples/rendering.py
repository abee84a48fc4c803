"""One example as tokens, and which of them are learnt.

    {"messages": [{"role": "user", "content": ...}, ...]}    what the assistant says, with the end of its turn
    {"prompt": ..., "completion": ...}                       the completion, and the token that ends a text
    {"text": ...}                                            everything, and the token that ends a text

An example is tokenized as one text, as it is when a conversation goes on; a token is learnt that overlaps with what
is to be learnt. What the assistant says is found by rendering the conversation up to each of its turns.
"""

from collections.abc import Sequence

import numpy as np

from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError

KEYS = (("messages",), ("prompt", "completion"), ("text",))
ASSISTANT = "assistant"

Span = tuple[int, int]  # characters begin..end-1


def render(example: dict, *, tokenizer: Tokenizer, where: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32 [n], learnt bool [n]). Raises UserError, which begins with `where`, for what is no example."""
    kind = next((keys for keys in KEYS if all(key in example for key in keys)), None)
    if kind is None:
        has = ", ".join(map(repr, example)) or "nothing"
        raise UserError(f"{where}: needs 'messages', 'prompt' and 'completion', or 'text': this has {has}")
    try:
        if kind == ("messages",):
            text, spans = _chat(example["messages"], tokenizer)
            return _tokens(text, spans, tokenizer, special=False)
        parts = [example[key] for key in kind]
        for key, part in zip(kind, parts):
            if not isinstance(part, str):
                raise UserError(f"{key!r} must be text, not {type(part).__name__}")
        text = "".join(parts)
        tokens, learnt = _tokens(text, [(len(text) - len(parts[-1]), len(text))], tokenizer, special=True)
        end = np.array(tokenizer.stop_ids[:1], np.int32)
        return np.concatenate([tokens, end]), np.concatenate([learnt, np.ones(len(end), bool)])
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _chat(messages: object, tokenizer: Tokenizer) -> tuple[str, list[Span]]:
    if not isinstance(messages, list) or not messages:
        raise UserError("'messages' must be a list of messages")
    text = tokenizer.render(messages, prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = tokenizer.render(messages[:index], prompt=True)
        after = tokenizer.render(messages[: index + 1], prompt=False)
        if not (after.startswith(before) and text.startswith(after.rstrip())):
            raise UserError(
                "the chat template renders a turn otherwise once others follow it: learn one turn an example"
            )
        spans.append((len(before), len(after.rstrip())))
    if not spans:
        raise UserError("no message has the role 'assistant', so there is nothing to learn")
    return text, spans


def _tokens(text: str, spans: Sequence[Span], tokenizer: Tokenizer, *, special: bool) -> tuple[np.ndarray, np.ndarray]:
    tokens, places = tokenizer.offsets(text, special=special)
    begins, ends = np.array(places, np.int64).reshape(-1, 2).T
    learnt = np.zeros(len(tokens), bool)
    for begin, end in spans:
        learnt |= (begins < end) & (ends > begin)
    return np.array(tokens, np.int32), learnt
