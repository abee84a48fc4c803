"""Perplexity of texts: of a token, a word and a byte."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from ladder_jax.config.fields import check_type
from ladder_jax.decode.engine import jsonl
from ladder_jax.decode.request import whole_numbers
from ladder_jax.errors import UserError, whole
from ladder_jax.evaluate.model import WINDOW, Model
from ladder_jax.evaluate.scorer import Scorer, Span
from ladder_jax.files import digest
from ladder_jax.nn import Transformer


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Of documents with log-likelihoods LL (nats), each the sum over its windows.

    tokens: that were scored, with what the tokenizer puts around a text.
    loss: -sum(LL) / tokens, nats a token. perplexity: exp(loss).
    loss_stderr: the standard error of that ratio, if windows are what is drawn at random (Cochran,
        Sampling Techniques, 1977, section 6.4); None for a single window.
    word_perplexity: exp(-sum(LL) / words). byte_perplexity: exp(-sum(LL) / bytes). bits_per_byte:
        -sum(LL) / bytes / ln 2. As lm-evaluation-harness has them (lm_eval/api/metrics.py:
        weighted_perplexity, bits_per_byte); None without texts. words:
        len(re.split(r"\\s+", text)), as it counts them (lm_eval/api/task.py: count_words): space at
        an end of a text adds an empty word. bytes: of UTF-8.
    window, stride: see `windows`.

    A perplexity that is too large for a float is None.
    """

    tokens: int
    loss: float
    perplexity: float | None
    loss_stderr: float | None
    documents: int
    windows: int
    window: int
    stride: int
    words: int | None = None
    word_perplexity: float | None = None
    bytes: int | None = None
    byte_perplexity: float | None = None
    bits_per_byte: float | None = None

    def of_texts(self, texts: Sequence[str]) -> "Perplexity":
        """With what needs the texts whose tokens were scored."""
        total = self.loss * self.tokens
        words = sum(len(re.split(r"\s+", text)) for text in texts)
        size = sum(len(text.encode("utf-8")) for text in texts)
        return dataclasses.replace(
            self,
            words=words,
            word_perplexity=_exp(total / words),
            bytes=size,
            byte_perplexity=_exp(total / size),
            bits_per_byte=total / size / math.log(2),
        )


def perplexity(
    model: Transformer | Scorer | Model,
    tokens: Sequence[int] | Sequence[Sequence[int]],
    *,
    window: int | None = None,
    stride: int | None = None,
    prefix: int | None = None,
) -> Perplexity:
    """Of one document's tokens [N], or of several documents', each by itself.

    model: programs are kept by definition and shape: the same one with other parameters is not
        compiled again.
    window: the most tokens that the model reads at once; by default a Model's own, else 2,048.
    stride, prefix: see `windows`; with no prefix the first token of each document is not scored.

    Raises UserError where there is nothing to score.
    """
    check_type("model", model, Transformer, Scorer, Model)
    check_type("tokens", tokens, Sequence, np.ndarray, jax.Array)
    own = WINDOW
    scorer = model
    if isinstance(model, Model):
        own = model.window
        scorer = model.scorer
    elif isinstance(model, Transformer):
        scorer = Scorer(model)
    if window is None:
        window = own
    if len(tokens) and np.ndim(tokens[0]) == 0:
        tokens = [tokens]
    documents = [
        whole_numbers("a document", np.asarray(document, object).tolist()) for document in tokens
    ]
    return _measured(
        lambda: scorer,
        documents,
        prefix=prefix,
        window=window,
        stride=stride,
    )


def text_perplexity(
    model: Model,
    texts: Sequence[str],
    *,
    stride: int | None = None,
    file: str | None = None,
) -> Perplexity:
    """Of several texts, each by itself, after the model's prefix token and in its window.

    file: see `jsonl.carry_out`; a line is a window's. Raises UserError where there is nothing to
        score.
    """
    check_type("texts", texts, list, tuple)  # each character of one text would be a document
    check_type("model", model, Model)
    texts = [text for text in texts if text]
    documents = [model.encode(text) for text in texts]
    how = dict(prefix=model.prefix, window=model.window, stride=stride)
    about = dict(about=model.digest, file=file, label="{done}/{total} windows")
    found = _measured(lambda: model.scorer, documents, **how, **about)
    return found.of_texts(texts)


def _measured(
    scorer: Callable[[], Scorer],
    documents: Sequence[Sequence[int]],
    *,
    prefix: int | None,
    window: int,
    stride: int | None,
    about: str = "",
    file: str | None = None,
    label: str | None = None,
) -> Perplexity:
    """scorer: asked for when there is something left to score. about: the model, in the digests.
    file, label: see `jsonl.carry_out`.
    """
    if stride is None:
        stride = window
    how = dict(prefix=prefix, window=window, stride=stride)
    cut = [
        (number, span)
        for number, document in enumerate(documents)
        for span in windows(document, **how)
    ]
    if not cut:
        raise UserError("the text holds no token to score")
    digests = [digest(about, number, span.context, span.scored) for number, span in cut]

    def work(left: list[int]) -> Iterator[tuple[int, dict]]:
        spans = [cut[index][1] for index in left]
        for place, score in scorer().scores(spans):
            index = left[place]
            document, _ = cut[index]
            line = {
                "index": index,
                "document": document,
                "tokens": len(score.logprobs),
                "loglikelihood": score.loglikelihood,
                "request": digests[index],
            }
            yield index, line

    results = jsonl.carry_out(dict(enumerate(digests)), work, file=file, label=label)
    tokens = np.array([result["tokens"] for result in results], np.float64)
    losses = -np.array([result["loglikelihood"] for result in results], np.float64)
    total = tokens.sum()
    loss = float(losses.sum() / total)
    n = len(results)
    loss_stderr = None
    if n > 1:
        spread = np.square(losses - loss * tokens).sum()
        loss_stderr = float(math.sqrt(n / (n - 1) * spread) / total)
    return Perplexity(
        tokens=int(total),
        loss=loss,
        perplexity=_exp(loss),
        loss_stderr=loss_stderr,
        documents=len(documents),
        windows=n,
        window=window,
        stride=stride,
    )


def _exp(value: float) -> float | None:
    try:
        return math.exp(value)
    except OverflowError:
        return None


def windows(
    tokens: Sequence[int], *, prefix: int | None, window: int, stride: int
) -> Iterator[Span]:
    """The spans of one document.

    The first window scores its first `window` tokens, after `prefix`; each later one the next
    `stride`, or what is left, after as many tokens as still fit: the model reads `window` tokens
    each time. With stride = window (the default) that is lm-evaluation-harness's
    `loglikelihood_rolling` (lm_eval/utils.py: get_rolling_token_windows with context_len=1, then
    make_disjoint_window), and in general its context_len = window - stride + 1. A smaller stride is
    the sliding window of Hugging Face's "Perplexity of fixed-length models": every token but the
    first ones has at least window - stride tokens before it, for window / stride times the work.

    prefix: the token before the first; None: the document's own first token, which then is not
        scored.
    """
    whole("window", window, least=1)
    if whole("stride", stride, least=1) > window:
        raise UserError(f"stride must be between 1 and the window, {window}, not {stride}")
    text = [int(token) for token in tokens]
    if prefix is not None:
        text = [whole("prefix", prefix, least=0), *text]
    begin = 1
    size = window
    while begin < len(text):
        end = min(begin + size, len(text))
        left = max(0, end - 1 - window)
        yield Span(text[left:begin], text[begin:end])
        begin = end
        size = stride
