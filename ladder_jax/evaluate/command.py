"""The verb `evaluate`: perplexity of a text, or the share of right answers to a file of
questions.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence

from ladder_jax import files, parallel
from ladder_jax.config.fields import not_none
from ladder_jax.data.store import sources
from ladder_jax.decode import memory
from ladder_jax.errors import UserError
from ladder_jax.evaluate import (
    generation,
    multiple_choice,
    open_model,
    read_choices,
    read_questions,
    tasks,
    text_perplexity,
)

OPENED = ("ladder_layers", "residual", "ranks", "tensor", "data", "window", "batch_tokens")
ANSWERS = ("max_new_tokens", "stop", "slots")
SHOTS = ("shots", "shots_file", "limit")
WAYS = {
    "text": ("stride", "field", "batch_tokens", "data"),
    "multiple_choice": (*SHOTS, "batch_tokens", "data"),
    "generation": (*SHOTS, *ANSWERS),
}
"""The options that are not for all of the ways."""


def run(args: dict) -> None:
    """Print the result. Raises UserError for what cannot be evaluated, before any weights are read
    where it can.
    """
    way = _check(args)
    parallel.use_compilation_cache()
    if way == "text":
        measure = text_perplexity
        asked = dict(texts=_texts(args), stride=args["stride"])
    elif way == "multiple_choice":
        measure = multiple_choice
        asked = _questions(args, args[way], read_choices)
    else:
        measure = generation
        asked = {**_questions(args, args[way], read_questions), **_given(args, ANSWERS)}
    model = open_model(args["checkpoint"], prefix=args["prefix_token"], **_given(args, OPENED))
    fewer = "--slots" if way == "generation" else "--batch-tokens"
    instead = f"fewer {fewer}, a shorter --window or more tensor ranks (--tensor) need less"
    with memory.explained(f"evaluating {args[way]!r}", instead=instead):
        found = measure(model, **asked, file=args["out"])
    result = {"checkpoint": args["checkpoint"], "file": args[way], **dataclasses.asdict(found)}
    if args["json"]:
        print(json.dumps(result))
        return
    for name, value in result.items():
        if not name.endswith("_stderr"):
            print(f"{name.replace('_', ' '):<22}{_words(value)}{_error(result, name)}")


def _check(args: dict) -> str:
    given = [way for way in WAYS if args[way] is not None]
    if len(given) != 1:
        raise UserError(
            "evaluate needs --text FILE, --multiple-choice FILE or --generation FILE, one of these"
        )
    for name in dict.fromkeys(itertools.chain(*WAYS.values())):
        allowed = [way for way, options in WAYS.items() if name in options]
        if args[name] is not None and given[0] not in allowed:
            raise UserError(f"{_option(name)} is for {' and '.join(map(_option, allowed))}")
    if bool(args["shots"]) != bool(args["shots_file"]):
        raise UserError("--shots N and --shots-file FILE go together")
    files.check_writable("out", args["out"])
    return given[0]


def _given(args: dict, names: Sequence[str]) -> dict:
    return not_none({name: args[name] for name in names})


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _texts(args: dict) -> list[str]:
    field = args["field"] or "text"
    parts = sources.plan([args["text"]])
    texts = []
    for part in parts:
        texts += [text for text in sources.read(part, field=field) if text]
    if not texts:
        raise UserError(f"{args['text']!r} holds no text")
    return texts


def _questions(args: dict, file: str, read: Callable[[str], list]) -> dict:
    shots_from = ()
    if args["shots_file"]:
        shots_from = read(args["shots_file"])
    examples = read(file)[: args["limit"]]
    tasks.library()
    return dict(examples=examples, shots=args["shots"] or 0, shots_from=shots_from)


def _words(value: str | int | float | None) -> str:
    if value is None:
        return "too large"
    if isinstance(value, float):
        return f"{value:.4f}"
    return str(value)


def _error(result: dict, name: str) -> str:
    error = result.get(f"{name}_stderr")
    if error is None:
        return ""
    return f" +- {error:.4f}"
