"""A file of questions as a task of lm-evaluation-harness, which writes the prompts and judges the answers."""

import collections
import dataclasses
from collections.abc import Sequence

from ladder_jax.errors import UserError
from ladder_jax.evaluate.answers import MAX_NEW_TOKENS, STOP
from ladder_jax.evaluate.examples import Choice, Question
from ladder_jax.evaluate.model import SLOTS, Model
from ladder_jax.evaluate.rows import Progress


@dataclasses.dataclass(frozen=True)
class MultipleChoice:
    """Shares of right answers; a choice's log-likelihood is that of " " + choice after the prompt.

    accuracy: of the choice with the largest log-likelihood. accuracy_normalised: with the largest log-likelihood over
    its length in characters; accuracy_bytes: in bytes of UTF-8. In either length the space does not count, and of
    equal ones the first is taken. lm-evaluation-harness calls them acc, acc_norm and acc_bytes (lm_eval/api/task.py:
    ConfigurableTask.process_results). *_stderr: the standard error of the mean; None for a single question.
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


@dataclasses.dataclass(frozen=True)
class Generation:
    """Greedy answers. accuracy: the share whose number after "#### " is right (strict-match of lm-evaluation-harness's
    gsm8k); accuracy_normalised: whose last number is (its flexible-extract). *_stderr: the standard error of the mean;
    None for a single question.

    truncated: how many prompts lost tokens on their left, to leave room for `max_new_tokens` in `window`.
    unfinished: how many answers were still going on after `max_new_tokens`.
    """

    examples: int
    accuracy: float
    accuracy_normalised: float
    accuracy_stderr: float | None
    accuracy_normalised_stderr: float | None
    truncated: int
    unfinished: int
    shots: int
    window: int
    max_new_tokens: int


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

    shots, shots_from: the first `shots` of these questions stand before each, with their answers; a question is not its
    own shot. Raises UserError, with the line's number, for what cannot be scored; and without lm-evaluation-harness.
    """
    local = library()
    pool = _pool(examples, shots, shots_from)
    task = local.multiple_choice(examples, shots=shots, pool=pool)
    lm = local.Choices(model, examples, task, file=file, progress=progress)
    found = local.run(lm, task)
    names = dict(accuracy="acc", accuracy_normalised="acc_norm", accuracy_bytes="acc_bytes")
    return MultipleChoice(
        examples=len(examples),
        **_scores(found, {name: (metric, "none") for name, metric in names.items()}),
        truncated=lm.truncated,
        shots=shots,
        window=model.window,
    )


def generation(
    model: Model,
    examples: Sequence[Question],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    stop: Sequence[str] = STOP,
    slots: int = SLOTS,
    shots: int = 0,
    shots_from: Sequence[Question] = (),
    file: str | None = None,
    progress: Progress | None = None,
) -> Generation:
    """file, progress: see `carry_out`; a row is a question with what the model wrote.

    stop: texts that end an answer, and are not part of it; the tokenizer's stop tokens do too.
    slots: questions that are answered at the same time. shots, shots_from: see `multiple_choice`.
    Raises UserError, with the line's number, for what cannot be asked; and without lm-evaluation-harness.
    """
    if not 0 < max_new_tokens < model.window:
        raise UserError(
            f"max_new_tokens={max_new_tokens} must be at least 1, and leave room for a prompt in the window of"
            f" {model.window}"
        )
    if not all(stop):
        raise UserError(f"stop must be strings, none of them empty, not {list(stop)}")
    local = library()
    pool = _pool(examples, shots, shots_from)
    task = local.generation(examples, shots=shots, pool=pool, stop=stop, max_new_tokens=max_new_tokens)
    lm = local.Texts(model, examples, task, slots=slots, file=file, progress=progress)
    found = local.run(lm, task)
    names = dict(accuracy="strict-match", accuracy_normalised="flexible-extract")
    return Generation(
        examples=len(examples),
        **_scores(found, {name: ("exact_match", taken) for name, taken in names.items()}),
        truncated=lm.truncated,
        unfinished=lm.unfinished,
        shots=shots,
        window=model.window,
        max_new_tokens=max_new_tokens,
    )


def library():
    """What builds on lm-evaluation-harness. Raises UserError where that is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise UserError("multiple choice and generation need lm-eval: pip install 'ladder-jax[lm-eval]'") from None
    from ladder_jax.evaluate import local_tasks

    return local_tasks


def _pool(examples: Sequence, shots: int, source: Sequence) -> list:
    """As many of `source` as suffice for every question's shots. Raises UserError where there are too few."""
    if not shots:
        return []
    asked = lambda one: (one.prompt, one.answer)
    counts = collections.Counter(map(asked, source))
    for example in examples:
        others = len(source) - counts[asked(example)]
        if others < shots:
            raise UserError(f"line {example.line}: --shots {shots}: --shots-file holds only {others} other questions")
    return list(source[: shots + max(counts.values())])


def _scores(found: dict, names: dict[str, tuple[str, str]]) -> dict[str, float | None]:
    """name: the metric, and the filter before it, in the harness's results."""
    error = lambda value: None if value == "N/A" else float(value)
    scores = {name: float(found[f"{metric},{taken}"]) for name, (metric, taken) in names.items()}
    errors = {f"{name}_stderr": error(found[f"{metric}_stderr,{taken}"]) for name, (metric, taken) in names.items()}
    return scores | errors
