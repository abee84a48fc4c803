"""Perplexity of texts: of a token, a word and a byte."""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ladder_jax.errors import UserError
from ladder_jax.evaluate import pairs
from ladder_jax.evaluate.model import WINDOW, Model, open_model
from ladder_jax.evaluate.rows import Progress, Row, carry_out
from ladder_jax.evaluate.scorer import Scorer, Span
from ladder_jax.evaluate.windows import windows
from ladder_jax.nn import ModelDef, Params, Transformer


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Of documents with log-likelihoods LL (nats), each the sum over its windows.

    tokens: that were scored, with what the tokenizer puts around a text.
    loss: -sum(LL) / tokens, nats a token. perplexity: exp(loss).
    loss_stderr: the standard error of that ratio, if windows are what is drawn at random (Cochran, Sampling
        Techniques, 1977, section 6.4); None for a single window.
    word_perplexity: exp(-sum(LL) / words). byte_perplexity: exp(-sum(LL) / bytes). bits_per_byte:
        -sum(LL) / bytes / ln 2. As lm-evaluation-harness has them (lm_eval/api/metrics.py: weighted_perplexity,
        bits_per_byte); None without texts. words: len(re.split(r"\\s+", text)), as it counts them (lm_eval/api/task.py:
        count_words): space at an end of a text adds an empty word. bytes: of UTF-8.
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
    model: Transformer | ModelDef | Scorer | Model | str | os.PathLike,
    tokens: Sequence[int] | Sequence[Sequence[int]],
    *,
    params: Params | None = None,
    window: int | None = None,
    stride: int | None = None,
    prefix: int | None = None,
) -> Perplexity:
    """Of one document's tokens [N], or of several documents', each by itself.

    model: a Transformer, a ModelDef with its `params`, a Scorer, a Model, or a checkpoint's path. Programs are kept
        by definition and shape: the same model with other parameters is not compiled again.
    window: the most tokens that the model reads at once; by default a Model's or checkpoint's own, else 2,048.
    stride, prefix: see `windows`; with no prefix the first token of each document is not scored.

    Raises UserError where there is nothing to score.
    """
    if isinstance(model, str | os.PathLike):
        model = open_model(model)
    if window is None:
        window = model.window if isinstance(model, Model) else WINDOW
    scorer = model.scorer if isinstance(model, Model) else model if isinstance(model, Scorer) else Scorer(model, params)
    one = len(tokens) and np.ndim(tokens[0]) == 0
    documents = [np.asarray(document).tolist() for document in ([tokens] if one else tokens)]
    cut = _cut(documents, prefix=prefix, window=window, stride=stride)
    results = carry_out(_rows(cut), functools.partial(_work, lambda: scorer, cut))
    return _summary(results, documents=len(documents), window=window, stride=stride)


def text_perplexity(
    model: Model,
    texts: Sequence[str],
    *,
    stride: int | None = None,
    file: str | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Of several texts, each by itself, after the model's prefix token and in its window.

    file, progress: see `carry_out`; a row is a window. Raises UserError where there is nothing to score.
    """
    texts = [text for text in texts if text]
    documents = [pairs.encode(text, tokenizer=model.tokenizer) for text in texts]
    size = dict(window=model.window, stride=stride)
    cut = _cut(documents, prefix=model.prefix, **size)
    rows = _rows(cut, model.digest if file else None)
    results = carry_out(rows, functools.partial(_work, lambda: model.scorer, cut), file=file, progress=progress)
    return _summary(results, documents=len(texts), **size).of_texts(texts)


def _cut(documents: Sequence[Sequence[int]], **how) -> list[tuple[int, Span]]:
    cut = [(index, span) for index, document in enumerate(documents) for span in windows(document, **how)]
    if not cut:
        raise UserError("the text holds no token to score")
    return cut


def _rows(cut: list[tuple[int, Span]], digest: str | None = None) -> list[Row]:
    if digest is None:
        return [Row(index, "") for index in range(len(cut))]
    return [Row.of(index, digest, number, span.context, span.scored) for index, (number, span) in enumerate(cut)]


def _work(scorer: Callable[[], Scorer], cut: list[tuple[int, Span]], left: list[Row]) -> Iterator[tuple[Row, dict]]:
    for index, score in scorer().scores([cut[row.index][1] for row in left]):
        tokens = {"document": cut[left[index].index][0], "tokens": len(score.logprobs)}
        yield left[index], {**tokens, "loglikelihood": score.loglikelihood}


def _summary(results: list[dict], *, documents: int, window: int, stride: int | None) -> Perplexity:
    counts = np.array([result["tokens"] for result in results], np.float64)
    losses = -np.array([result["loglikelihood"] for result in results], np.float64)
    loss, n = float(losses.sum() / counts.sum()), len(results)
    spread = np.square(losses - loss * counts).sum()
    return Perplexity(
        tokens=int(counts.sum()),
        loss=loss,
        perplexity=_exp(loss),
        loss_stderr=float(math.sqrt(n / (n - 1) * spread) / counts.sum()) if n > 1 else None,
        documents=documents,
        windows=n,
        window=window,
        stride=window if stride is None else stride,
    )


def _exp(value: float) -> float | None:
    try:
        return math.exp(value)
    except OverflowError:
        return None
