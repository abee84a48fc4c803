"""A long text as windows that a model can see at once; each of its tokens is scored in exactly one of them."""

from collections.abc import Iterator, Sequence

from ladder_jax.errors import UserError
from ladder_jax.evaluate.scorer import Span


def windows(tokens: Sequence[int], *, prefix: int | None, window: int, stride: int | None = None) -> Iterator[Span]:
    """The spans of one document.

    The first window scores its first `window` tokens, after `prefix`; each later one the next `stride`, or what is
    left, after as many tokens as still fit: the model reads `window` tokens each time. With stride = window (the
    default) that is lm-evaluation-harness's `loglikelihood_rolling` (lm_eval/utils.py: get_rolling_token_windows
    with context_len=1, then make_disjoint_window), and in general its context_len = window - stride + 1. A smaller
    stride is the sliding window of Hugging Face's "Perplexity of fixed-length models": every token but the first
    ones has at least window - stride tokens before it, for window / stride times the work.

    prefix: the token before the first; None: the document's own first token, which then is not scored.
    """
    stride = window if stride is None else stride
    if window < 1:
        raise UserError(f"window must be at least 1, not {window}")
    if not 1 <= stride <= window:
        raise UserError(f"stride must be between 1 and the window, {window}, not {stride}")
    tokens = [int(token) for token in tokens]
    whole = tokens if prefix is None else [prefix, *tokens]
    begin, size = 1, window
    while begin < len(whole):
        end = min(begin + size, len(whole))
        yield Span(whole[max(0, end - 1 - window) : begin], whole[begin:end])
        begin, size = end, stride
