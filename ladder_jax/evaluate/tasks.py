"""Multiple choice and generation: questions as tasks of lm-evaluation-harness, which writes the prompts and judges the
answers."""

import collections
import dataclasses
import functools
from collections.abc import Sequence

from ladder_jax.decode import Finish
from ladder_jax.errors import UserError
from ladder_jax.evaluate.answers import MAX_NEW_TOKENS, STOP
from ladder_jax.evaluate.examples import Choice, Question
from ladder_jax.evaluate.model import SLOTS, Model
from ladder_jax.evaluate.rows import Progress, carry_out


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
    """The accuracies over `examples`.

    file, progress: see `carry_out`; a row is a question, with its choices' log-likelihoods.
    shots, shots_from: the first `shots` questions of `shots_from` stand before each question, with their answers; a
    question is not its own shot.
    Raises UserError, with the line's number, where a question cannot be scored; and without lm-evaluation-harness.
    """
    local = library()
    pool = _pool(examples, shots, shots_from)
    task = local.LocalTask(local.CHOICES, examples, shots=shots, pool=pool)
    lm = local.Recorded(model, task, examples, carry=functools.partial(carry_out, file=file, progress=progress))
    names = dict(accuracy="acc,none", accuracy_normalised="acc_norm,none", accuracy_bytes="acc_bytes,none")
    return MultipleChoice(
        examples=len(examples),
        **local.run(lm, task, names),
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
    """The accuracies of the answers that the model writes to `examples`.

    file, progress: see `carry_out`; a row is a question, with the model's answer.
    stop: texts that end an answer and are not part of it. The tokenizer's stop tokens end it too.
    slots: questions that are answered at the same time. shots, shots_from: see `multiple_choice`.
    Raises UserError, with the line's number, where a question cannot be asked; and without lm-evaluation-harness.
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
    settings = {"until": list(stop), "do_sample": False, "max_gen_toks": max_new_tokens}
    config = {**local.GENERATION, "generation_kwargs": settings}
    task = local.LocalTask(config, examples, shots=shots, pool=pool)
    carry = functools.partial(carry_out, file=file, progress=progress)
    lm = local.Recorded(model, task, examples, carry=carry, slots=slots)
    names = dict(accuracy="exact_match,strict-match", accuracy_normalised="exact_match,flexible-extract")
    return Generation(
        examples=len(examples),
        **local.run(lm, task, names),
        truncated=lm.truncated,
        unfinished=sum(result["finish_reason"] == Finish.LENGTH for result in lm.results),
        shots=shots,
        window=model.window,
        max_new_tokens=max_new_tokens,
    )


def library():
    """The module that imports lm-evaluation-harness. Raises UserError where that is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise UserError("multiple choice and generation need lm-eval: pip install 'ladder-jax[lm-eval]'") from None
    from ladder_jax.evaluate import local_tasks

    return local_tasks


def _pool(examples: Sequence, shots: int, source: Sequence) -> list:
    """The first questions of `source`, enough for the shots of every example. Raises UserError for too few."""
    if not shots:
        return []
    key = lambda one: (one.prompt, one.answer)
    counts = collections.Counter(map(key, source))
    for example in examples:
        others = len(source) - counts[key(example)]
        if others < shots:
            raise UserError(f"line {example.line}: --shots {shots}: --shots-file holds only {others} other questions")
    return list(source[: shots + max(counts.values())])
