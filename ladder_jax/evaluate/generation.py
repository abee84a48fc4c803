"""Answers that the model writes, and whether they are the right ones."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode import Engine, Finish, Request, Result
from ladder_jax.errors import UserError
from ladder_jax.evaluate import answers, pairs
from ladder_jax.evaluate.examples import Question, with_shots
from ladder_jax.evaluate.means import mean, standard_error
from ladder_jax.evaluate.model import SLOTS, Model
from ladder_jax.evaluate.rows import Progress, Row, carry_out

STOP = ("Question:", "</s>", "<|im_end|>")  # of lm-evaluation-harness's gsm8k
MAX_NEW_TOKENS = 256  # its default (max_gen_toks)


@dataclasses.dataclass(frozen=True)
class Generation:
    """Greedy answers. accuracy: the share whose number after "#### " is right (strict-match of lm-evaluation-harness's
    gsm8k); accuracy_normalised: whose last number is (its flexible-extract). *_stderr: see `standard_error`.

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
    slots: questions that are answered at the same time. shots, shots_from: see `with_shots`.
    Raises UserError, with the line's number, for what cannot be asked.
    """
    room = model.window - max_new_tokens
    if max_new_tokens < 1 or room < 1:
        raise UserError(
            f"max_new_tokens={max_new_tokens} must be at least 1, and leave room for a prompt in the window of"
            f" {model.window}"
        )
    prompts, truncated, ends = [], 0, stop_ids(stop, tokenizer=model.tokenizer)
    for example in examples:
        try:
            text = with_shots(example, shots=shots, source=shots_from)
        except UserError as error:
            raise UserError(f"line {example.line}: {error}") from None
        tokens = pairs.encode(text, tokenizer=model.tokenizer) or [model.prefix]
        truncated += len(tokens) > room
        prompts.append(tokens[-room:])
    request = lambda row: Request(prompts[row.index], max_new_tokens=max_new_tokens, stop=stop, stop_ids=ends)

    def work(left: list[Row]) -> Iterator[tuple[Row, dict]]:
        capacity = max(len(prompts[row.index]) for row in left) + max_new_tokens
        engine = model.engine(capacity=capacity, slots=min(slots, len(left)))
        for row, result in answer(engine, left, request=request):
            yield row, _judged(examples[row.index], result)

    settings = [model.digest, max_new_tokens, list(stop), ends]
    rows = [Row.of(i, settings, prompts[i], example.answer) for i, example in enumerate(examples)]
    results = carry_out(rows, work, file=file, progress=progress)
    names = dict(accuracy="right", accuracy_normalised="right_flexible")
    scores = {name: [float(result[kept]) for result in results] for name, kept in names.items()}
    return Generation(
        examples=len(examples),
        **{name: mean(values) for name, values in scores.items()},
        **{f"{name}_stderr": standard_error(values) for name, values in scores.items()},
        truncated=truncated,
        unfinished=sum(result["finish_reason"] == Finish.LENGTH for result in results),
        shots=shots,
        window=model.window,
        max_new_tokens=max_new_tokens,
    )


def stop_ids(stop: Sequence[str], *, tokenizer: Tokenizer) -> list[int]:
    """The tokenizer's own, and those of `stop` that are special tokens: they are never seen in a text."""
    single = [tokens for text in stop if len(tokens := tokenizer.encode_bare(text)) == 1]
    return [*tokenizer.stop_ids, *(tokens[0] for tokens in single if not tokenizer.to_bytes(tokens))]


def answer[Key](
    engine: Engine, left: Sequence[Key], *, request: Callable[[Key], Request]
) -> Iterator[tuple[Key, Result]]:
    """The result of each one's request, as they finish."""
    waiting, running = collections.deque(left), {}
    while waiting or running:
        while waiting and engine.stats().queued < engine.max_queue:
            one = waiting.popleft()
            running[engine.submit(request(one))] = one
        engine.step()
        for handle in [handle for handle in running if handle.done]:
            yield running.pop(handle), handle.result()


def _judged(example: Question, result: Result) -> dict:
    found = dict(strict=answers.strict(result.text), flexible=answers.flexible(result.text))
    return {
        "line": example.line,
        "text": result.text,
        "finish_reason": str(result.finish),
        **found,
        "right": answers.matches(found["strict"], example.answer),
        "right_flexible": answers.matches(found["flexible"], example.answer),
    }
