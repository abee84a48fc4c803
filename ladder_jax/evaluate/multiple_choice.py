"""Multiple choice by log-likelihood: the answer is the choice that the model finds most probable after the prompt."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from ladder_jax.errors import UserError
from ladder_jax.evaluate import pairs
from ladder_jax.evaluate.examples import DELIMITER, Choice, with_shots
from ladder_jax.evaluate.means import mean, standard_error
from ladder_jax.evaluate.model import Model
from ladder_jax.evaluate.rows import Progress, Row, carry_out
from ladder_jax.evaluate.scorer import Scorer, Span


@dataclasses.dataclass(frozen=True)
class MultipleChoice:
    """Shares of right answers; a choice's log-likelihood is that of " " + choice after the prompt.

    accuracy: of the choice with the largest log-likelihood. accuracy_normalised: with the largest log-likelihood over
    its length in characters; accuracy_bytes: in bytes of UTF-8. In either length the space does not count, and of
    equal ones the first is taken. lm-evaluation-harness calls them acc, acc_norm and acc_bytes (lm_eval/api/task.py:
    ConfigurableTask.process_results). *_stderr: see `standard_error`.
    truncated: how many prompts lost tokens on their left, so that the model sees no more than `window` at once.
    """

    examples: int
    accuracy: float
    accuracy_normalised: float
    accuracy_bytes: float
    accuracy_stderr: float | None
    accuracy_normalised_stderr: float | None
    accuracy_bytes_stderr: float | None
    truncated: int
    shots: int
    window: int


def multiple_choice(
    model: Model,
    examples: Sequence[Choice],
    *,
    shots: int = 0,
    shots_from: Sequence[Choice] = (),
    file: str | None = None,
    progress: Progress | None = None,
) -> MultipleChoice:
    """file, progress: see `carry_out`; a row is a question, with its choices' log-likelihoods.

    shots, shots_from: see `with_shots`. Raises UserError, with the line's number, for what cannot be scored.
    """
    spans, truncated, window = [], 0, model.window
    for example in examples:
        try:
            prompt = with_shots(example, shots=shots, source=shots_from)
            encoding = dict(tokenizer=model.tokenizer, prefix=model.prefix)
            whole = [pairs.pair(prompt, DELIMITER + choice, **encoding) for choice in example.choices]
            spans.append([pairs.cut(span, window=window) for span in whole])
        except UserError as error:
            raise UserError(f"line {example.line}: {error}") from None
        truncated += any(span.length > window for span in whole)
    decides = [(e.choices, e.gold, [(s.context, s.scored) for s in those]) for e, those in zip(examples, spans)]
    rows = [Row.of(index, model.digest, *each) for index, each in enumerate(decides)]
    results = carry_out(rows, lambda left: _work(model.scorer, left, examples, spans), file=file, progress=progress)
    scores = {name: [float(result[name]) for result in results] for name in ("right", "right_chars", "right_bytes")}
    names = dict(accuracy="right", accuracy_normalised="right_chars", accuracy_bytes="right_bytes")
    return MultipleChoice(
        examples=len(examples),
        **{name: mean(scores[kept]) for name, kept in names.items()},
        **{f"{name}_stderr": standard_error(scores[kept]) for name, kept in names.items()},
        truncated=truncated,
        shots=shots,
        window=window,
    )


def _work(
    scorer: Scorer, left: list[Row], examples: Sequence[Choice], spans: list[list[Span]]
) -> Iterator[tuple[Row, dict]]:
    asked = [(row, number) for row in left for number in range(len(spans[row.index]))]
    found: dict[int, dict[int, tuple[float, bool]]] = {}
    for index, score in scorer.scores([spans[row.index][number] for row, number in asked]):
        row, number = asked[index]
        those = found.setdefault(row.index, {})
        those[number] = score.loglikelihood, score.greedy
        if len(those) == len(spans[row.index]):
            yield row, _judged(examples[row.index], [those[n] for n in range(len(those))])


def _judged(example: Choice, scores: list[tuple[float, bool]]) -> dict:
    loglikelihoods = np.array([score[0] for score in scores])
    per = lambda lengths: int(np.argmax(loglikelihoods / np.array(lengths, np.float64)))
    chosen = int(np.argmax(loglikelihoods))
    return {
        "line": example.line,
        "answer": example.gold,
        "chosen": chosen,
        "right": chosen == example.gold,
        "right_chars": per([len(choice) for choice in example.choices]) == example.gold,
        "right_bytes": per([len(choice.encode("utf-8")) for choice in example.choices]) == example.gold,
        "loglikelihoods": loglikelihoods.tolist(),
        "greedy": [score[1] for score in scores],
    }
