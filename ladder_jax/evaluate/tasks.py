"""Multiple choice and generation: files of questions, to which lm-evaluation-harness writes the
prompts, and judges the answers.
"""

import dataclasses
import difflib
import json
import math
import statistics
import string
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ladder_jax.config.fields import check_type
from ladder_jax.data import json_lines
from ladder_jax.decode import Finish
from ladder_jax.decode.engine.jsonl import carry_out
from ladder_jax.decode.request import ends
from ladder_jax.errors import UserError, needed, whole
from ladder_jax.evaluate.model import MAX_NEW_TOKENS, SLOTS, STOP, Model
from ladder_jax.evaluate.scorer import Span
from ladder_jax.files import digest

LABEL = "{done}/{total} questions"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A question with several answers, of which number `gold`, from 0, is right."""

    line: int
    prompt: str
    choices: tuple[str, ...]
    gold: int

    @property
    def answer(self) -> str:
        return self.choices[self.gold]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question whose answer is to be written."""

    line: int
    prompt: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Shares of right answers. *_stderr: the standard error of the mean; None for a single
    question.

    truncated: how many prompts lost tokens on their left, so that the model sees no more than
        `window` at once.
    """

    examples: int
    accuracy: float
    accuracy_normalised: float
    accuracy_stderr: float | None
    accuracy_normalised_stderr: float | None
    truncated: int
    shots: int
    window: int


@dataclasses.dataclass(frozen=True)
class MultipleChoice(Accuracy):
    """A choice's log-likelihood is that of " " + choice after the prompt.

    accuracy: of the choice with the largest log-likelihood. accuracy_normalised: with the largest
    log-likelihood over its length in characters, without the space. Of equal ones the first is
    taken. lm-evaluation-harness calls them acc and acc_norm (lm_eval/api/task.py:
    ConfigurableTask.process_results).
    """


@dataclasses.dataclass(frozen=True)
class Generation(Accuracy):
    """Greedy answers. accuracy: the share whose number after "#### " is right (strict-match of
    lm-evaluation-harness's gsm8k); accuracy_normalised: whose last number is (its
    flexible-extract).

    truncated: also to leave room for `max_new_tokens`.
    unfinished: how many answers were still going on after `max_new_tokens`.
    """

    unfinished: int
    max_new_tokens: int


def multiple_choice(
    model: Model,
    examples: Sequence[Choice],
    *,
    shots: int = 0,
    shots_from: Sequence[Choice] = (),
    file: str | None = None,
) -> MultipleChoice:
    """The accuracies over `examples`.

    file: see `carry_out`; a line is a question's, with its choices' log-likelihoods.
    shots, shots_from: the first `shots` questions of `shots_from` stand before each question, with
    their answers; a question is not its own shot.
    Raises UserError, with the line's number, where a question cannot be scored; and without
    lm-evaluation-harness.
    """
    check_type("model", model, Model)
    harness = library()
    task = _task(harness.CHOICES, examples, shots, shots_from)
    pairs = harness.Pairs(model)
    spans: list[list[Span]] = []
    truncated = 0
    for example, asked in zip(examples, task.asked()):
        try:
            uncut = pairs.loglikelihood(asked, disable_tqdm=True)
            spans.append([model.cut(span) for span in uncut])
        except UserError as error:
            raise UserError(f"line {example.line}: {error}") from None
        truncated += any(span.length > model.window for span in uncut)
    digests = [
        digest(model.digest, one.choices, one.gold, [(span.context, span.scored) for span in those])
        for one, those in zip(examples, spans)
    ]

    def work(left: list[int]) -> Iterator[tuple[int, dict]]:
        asked = [(index, number) for index in left for number in range(len(spans[index]))]
        choices = [spans[index][number] for index, number in asked]
        found = {index: [None] * len(spans[index]) for index in left}
        for place, score in model.scorer.scores(choices):
            index, number = asked[place]
            scores = found[index]
            scores[number] = score.loglikelihood, score.greedy
            if None not in scores:
                chosen = _chosen(task, index, examples[index], scores)
                yield index, {"index": index, **chosen, "request": digests[index]}

    results = carry_out(dict(enumerate(digests)), work, file=file, label=LABEL)
    return MultipleChoice(
        examples=len(examples),
        **_shares(results, accuracy="right", accuracy_normalised="right_chars"),
        truncated=truncated,
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
) -> Generation:
    """The accuracies of the answers that the model writes to `examples`.

    file: see `carry_out`; a line is a question's, with the model's answer.
    stop: texts that end an answer and are not part of it. The tokenizer's stop tokens end it too.
    slots: questions that are answered at the same time. shots, shots_from: see `multiple_choice`.
    Raises UserError, with the line's number, where a question cannot be asked; and without
    lm-evaluation-harness.
    """
    check_type("model", model, Model)
    stops = ends(stop, tokenizer=model.tokenizer)
    harness = library()
    settings = {"until": list(stops["stop"]), "do_sample": False, "max_gen_toks": max_new_tokens}
    config = {**harness.gsm8k(), "generation_kwargs": settings}
    task = _task(config, examples, shots, shots_from)
    lm = harness.LadderJax(model)
    prompts = [asked.args[0] for (asked,) in task.asked()]
    requests = [lm.request(prompt, settings, seed=index) for index, prompt in enumerate(prompts)]
    about = [model.digest, max_new_tokens, stops["stop"], stops["stop_ids"]]
    digests = [
        digest(about, list(request.prompt), one.answer) for request, one in zip(requests, examples)
    ]

    def work(left: list[int]) -> Iterator[tuple[int, dict]]:
        asked = {index: requests[index] for index in left}
        for index, result in model.answers(asked, slots=slots):
            written = _written(task, index, examples[index], result)
            yield index, {"index": index, **written, "request": digests[index]}

    results = carry_out(dict(enumerate(digests)), work, file=file, label=LABEL)
    return Generation(
        examples=len(examples),
        **_shares(results, accuracy="right", accuracy_normalised="right_flexible"),
        truncated=sum(
            len(model.encode(prompt)) > model.window - max_new_tokens for prompt in prompts
        ),
        unfinished=sum(result["finish_reason"] == Finish.LENGTH for result in results),
        shots=shots,
        window=model.window,
        max_new_tokens=max_new_tokens,
    )


def library():
    """The module that imports lm-evaluation-harness. Raises UserError where that is not
    installed.
    """
    with needed("multiple choice and generation need lm-eval", extra="lm-eval"):
        import lm_eval  # noqa: F401
    from ladder_jax.evaluate import harness

    return harness


def _task(config: dict, examples: Sequence, shots: int, shots_from: Sequence):
    shots = whole("shots", shots, least=0)
    if not examples:
        raise UserError("there is no question")
    pool = map(_document, _pool(examples, shots, shots_from))
    documents = map(_document, examples)
    return library().LocalTask(config, list(documents), shots=shots, pool=list(pool))


def _document(example: Choice | Question) -> dict[str, Any]:
    """Without its line: in a file of shots the same question may stand on another one."""
    return dataclasses.asdict(dataclasses.replace(example, line=0))


def _pool(examples: Sequence, shots: int, source: Sequence) -> list:
    """The first questions of `source`, enough for the shots of every example. Raises UserError for
    too few.
    """
    if not shots:
        return []
    # The harness leaves out a shot that equals the question: its choices may have another order.
    known = {_asked(example): example for example in examples}
    pool = [known.get(_asked(one), one) for one in source[: shots + 1]]
    for example in examples:
        others = [one for one in pool if _asked(one) != _asked(example)]
        if len(others) < shots:
            raise UserError(
                f"line {example.line}: --shots {shots}: --shots-file holds only {len(others)} other questions"
            )
    return pool


def _asked(example: Choice | Question) -> tuple[str, str]:
    return example.prompt, example.answer


def _chosen(task, index: int, example: Choice, scores: list[tuple[float, bool]]) -> dict:
    loglikelihoods, greedy = map(list, zip(*scores))
    ((_, right),) = task.judged(index, scores).values()
    return {
        "line": example.line,
        "answer": example.gold,
        "chosen": int(np.argmax(loglikelihoods)),
        "right": bool(right["acc"]),
        "right_chars": bool(right["acc_norm"]),
        "loglikelihoods": loglikelihoods,
        "greedy": greedy,
    }


def _written(task, index: int, example: Question, result) -> dict:
    judged = task.judged(index, [result.text])
    ((strict,), right) = judged["strict-match"]
    ((flexible,), right_flexible) = judged["flexible-extract"]
    return {
        "line": example.line,
        "text": result.text,
        "finish_reason": str(result.finish),
        "strict": strict,
        "flexible": flexible,
        "right": bool(right["exact_match"]),
        "right_flexible": bool(right_flexible["exact_match"]),
    }


def _shares(results: Sequence[dict], **names: str) -> dict[str, float | None]:
    """The mean of each key, under another name, and its standard error."""
    found = {}
    for name, key in names.items():
        values = [float(result[key]) for result in results]
        found[name] = statistics.fmean(values)
        error = None
        if len(values) > 1:
            error = statistics.stdev(values) / math.sqrt(len(values))
        found[f"{name}_stderr"] = error
    return found


# Files of questions, a JSON object a line. What is wrong is named by its line.


def read_choices(file: str) -> list[Choice]:
    """Lines such as {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}; the answer may be
    a letter, or be one of the choices. Other keys are ignored. Raises UserError.
    """
    return json_lines.parsed(file, _choice, what="questions")


def read_questions(file: str) -> list[Question]:
    """Lines such as {"question": "2 + 2 =", "answer": "#### 4"}. Other keys are ignored. Raises
    UserError.
    """
    return json_lines.parsed(file, _question, what="questions")


def _question(found: Any, line: int, _: int) -> Question:
    return Question(line, _prompt(found), _text(found, "answer"))


def _prompt(found: Any) -> str:
    """`context` as it is; `question` as ARC and GSM8K ask theirs in lm-evaluation-harness."""
    if not isinstance(found, dict):
        raise UserError(f"this must be a JSON object, not {type(found).__name__}")
    if ("context" in found) == ("question" in found):
        raise UserError(
            f'there must be either "context" or "question"{_near(found, "question", "context")}'
        )
    if "context" in found:
        return _text(found, "context")
    return f"Question: {_text(found, 'question')}\nAnswer:"


def _choice(found: Any, line: int, _: int) -> Choice:
    prompt = _prompt(found)
    choices = found.get("choices")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(one, str) for one in choices)
    ):
        raise UserError(f'"choices" must be a list of two texts or more{_near(found, "choices")}')
    for number, choice in enumerate(choices):
        if not choice:
            raise UserError(f"choice {number} is empty, and has no length to normalise by")
        choice.encode()  # half of a surrogate pair is refused here
    return Choice(line, prompt, tuple(choices), _gold(found, choices))


def _gold(found: dict, choices: list[str]) -> int:
    if "answer" not in found:
        raise UserError(f'there is no "answer"{_near(found, "answer")}')
    answer = found["answer"]
    count = len(choices)
    letters = string.ascii_uppercase[:count]
    if type(answer) is int and 0 <= answer < count:
        return answer
    if isinstance(answer, str):
        read = {choices.index(answer)} if answer in choices else set()
        if len(answer) == 1 and answer in letters:
            read.add(letters.index(answer))
        if len(read) == 1:
            return read.pop()
        if read:
            raise UserError(
                f"answer {answer!r} is a choice's letter and another choice's text: name it by its number"
            )
    raise UserError(
        f"answer {json.dumps(answer, ensure_ascii=False)} is none of the {count} choices"
        f" (allowed: 0 to {count - 1}, A to {letters[-1]}, or a choice's text)"
    )


def _text(found: dict, key: str) -> str:
    text = found.get(key)
    if not isinstance(text, str):
        raise UserError(f'"{key}" must be a text{_near(found, key)}')
    text.encode()  # half of a surrogate pair is refused here
    return text


def _near(found: dict, *keys: str) -> str:
    """What a misspelt key may have been."""
    for key in keys:
        if key not in found:
            if near := difflib.get_close_matches(key, found, n=1):
                return f"; there is {near[0]!r}"
    return ""
