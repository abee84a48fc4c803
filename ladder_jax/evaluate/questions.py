"""Files of questions, a JSON object a line. What is wrong is named by its line."""

import dataclasses
import difflib
import json
import string
from collections.abc import Callable
from typing import Any

from ladder_jax.data import json_lines
from ladder_jax.errors import UserError


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


def read_choices(file: str) -> list[Choice]:
    """Lines such as {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}; the answer may be
    a letter, or be one of the choices. Other keys are ignored. Raises UserError.
    """
    return _read(file, _choice)


def read_questions(file: str) -> list[Question]:
    """Lines such as {"question": "2 + 2 =", "answer": "#### 4"}. Other keys are ignored. Raises
    UserError.
    """
    return _read(file, lambda line, found: Question(line, _prompt(found), _text(found, "answer")))


def _read(file: str, parse: Callable[[int, dict], Any]) -> list:
    found = []
    for number, line in json_lines.read(file):
        if not isinstance(line, dict):
            raise UserError(
                f"{file}:{number}: this must be a JSON object, not {type(line).__name__}"
            )
        try:
            found.append(parse(number, line))
        except UserError as error:
            raise UserError(f"{file}:{number}: {error}") from None
    if not found:
        raise UserError(f"{file!r} holds no questions")
    return found


def _prompt(found: dict) -> str:
    """`context` as it is; `question` as ARC and GSM8K ask theirs in lm-evaluation-harness."""
    if ("context" in found) == ("question" in found):
        raise UserError(
            f'there must be either "context" or "question"{_near(found, "question", "context")}'
        )
    if "context" in found:
        return _text(found, "context")
    return f"Question: {_text(found, 'question')}\nAnswer:"


def _choice(line: int, found: dict) -> Choice:
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
        _check_characters(choice, "choices")
    return Choice(line, _prompt(found), tuple(choices), _gold(found, choices))


def _gold(found: dict, choices: list[str]) -> int:
    if "answer" not in found:
        raise UserError(f'there is no "answer"{_near(found, "answer")}')
    answer = found["answer"]
    count = len(choices)
    if type(answer) is int and 0 <= answer < count:
        return answer
    if isinstance(answer, str):
        letters = string.ascii_uppercase[:count]
        read = {choices.index(answer)} if answer in choices else set()
        read |= {letters.index(answer)} if len(answer) == 1 and answer in letters else set()
        if len(read) > 1:
            raise UserError(
                f"answer {answer!r} is a choice's letter and another choice's text: name it by its number"
            )
        if read:
            return read.pop()
    last = string.ascii_uppercase[min(count, 26) - 1]
    raise UserError(
        f"answer {json.dumps(answer, ensure_ascii=False)} is none of the {count} choices"
        f" (allowed: 0 to {count - 1}, A to {last}, or a choice's text)"
    )


def _text(found: dict, key: str) -> str:
    if not isinstance(found.get(key), str):
        raise UserError(f'"{key}" must be a text{_near(found, key)}')
    _check_characters(found[key], key)
    return found[key]


def _check_characters(text: str, key: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f'half of a surrogate pair, which is no character, in "{key}"') from None


def _near(found: dict, *keys: str) -> str:
    """What a misspelt key may have been."""
    near = [
        one
        for key in keys
        if key not in found
        for one in difflib.get_close_matches(key, found, n=1)
    ]
    return f"; there is {near[0]!r}" if near else ""
