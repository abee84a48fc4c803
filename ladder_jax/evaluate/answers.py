"""Generate texts for many prompts with the engine."""

import collections
from collections.abc import Callable, Iterator, Sequence

from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode import Request, Result
from ladder_jax.evaluate.model import Model

STOP = ("Question:", "</s>", "<|im_end|>")  # of lm-evaluation-harness's gsm8k
MAX_NEW_TOKENS = 256  # its default (max_gen_toks)


def stop_ids(stop: Sequence[str], *, tokenizer: Tokenizer) -> list[int]:
    """The tokenizer's stop tokens, and the special tokens among `stop`, which never appear in a decoded text."""
    single = [tokens for text in stop if len(tokens := tokenizer.encode_bare(text)) == 1]
    return [*tokenizer.stop_ids, *(tokens[0] for tokens in single if not tokenizer.to_bytes(tokens))]


def answer[Key](
    model: Model, left: Sequence[Key], *, request: Callable[[Key], Request], slots: int
) -> Iterator[tuple[Key, Result]]:
    """Yield each key with the result of its request, as requests finish; `slots` of them run at the same time."""
    requests = {one: request(one) for one in left}
    capacity = max(len(one.prompt) + one.max_new_tokens for one in requests.values())
    engine = model.engine(capacity=capacity, slots=min(slots, len(left)))
    waiting, running = collections.deque(left), {}
    while waiting or running:
        while waiting and engine.stats().queued < engine.max_queue:
            one = waiting.popleft()
            running[engine.submit(requests[one])] = one
        engine.step()
        for handle in [handle for handle in running if handle.done]:
            yield running.pop(handle), handle.result()
