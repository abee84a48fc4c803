"""The verb `evaluate`: perplexity of a text, or the share of right answers to a file of
questions.
"""

import dataclasses
import json
from collections.abc import Sequence

from ladder_jax import files, parallel
from ladder_jax.data.store import sources
from ladder_jax.decode import memory
from ladder_jax.errors import UserError
from ladder_jax.evaluate import (
    Model,
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
WAYS = ("text", "multiple_choice", "generation")
ONLY = {
    "stride": ("text",),
    "field": ("text",),
    "shots": ("multiple_choice", "generation"),
    "shots_file": ("multiple_choice", "generation"),
    "limit": ("multiple_choice", "generation"),
    "max_new_tokens": ("generation",),
    "stop": ("generation",),
    "slots": ("generation",),
    "batch_tokens": ("text", "multiple_choice"),
    "data": ("text", "multiple_choice"),
}
"""Options that are for some of the ways."""


def run(args: dict) -> None:
    """Print the result. Raises UserError for what cannot be evaluated, before any weights are read
    where it can.
    """
    way = _check(args)
    parallel.use_compilation_cache()
    asked = _texts(args) if way == "text" else _questions(args, way)
    model = open_model(args["checkpoint"], prefix=args["prefix_token"], **_given(args, OPENED))
    fewer = "--slots" if way == "generation" else "--batch-tokens"
    instead = f"fewer {fewer}, a shorter --window or more tensor ranks (--tensor) need less"
    with memory.explained(f"evaluating {args[way]!r}", instead=instead):
        found = _measured(model, way, args, **asked, file=args["out"])
    result = {"checkpoint": args["checkpoint"], "file": args[way], **dataclasses.asdict(found)}
    if args["json"]:
        print(json.dumps(result))
    else:
        print(_words(way, result))


def _check(args: dict) -> str:
    given = [way for way in WAYS if args[way] is not None]
    if len(given) != 1:
        raise UserError(
            "evaluate needs --text FILE, --multiple-choice FILE or --generation FILE, one of these"
        )
    for name, ways in ONLY.items():
        if args[name] is not None and given[0] not in ways:
            allowed = " and ".join(map(_option, ways))
            raise UserError(f"{_option(name)} is for {allowed}")
    if bool(args["shots"]) != bool(args["shots_file"]):
        raise UserError("--shots N and --shots-file FILE go together")
    files.check_writable("out", args["out"])
    return given[0]


def _given(args: dict, names: Sequence[str]) -> dict:
    return {name: args[name] for name in names if args[name] is not None}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _texts(args: dict) -> dict:
    field = args["field"] or "text"
    parts = sources.plan([args["text"]])
    texts = []
    for part in parts:
        texts += [text for text in sources.read(part, field=field) if text]
    if not texts:
        raise UserError(f"{args['text']!r} holds no text")
    return dict(texts=texts)


def _questions(args: dict, way: str) -> dict:
    read = read_choices if way == "multiple_choice" else read_questions
    examples = read(args[way])[: args["limit"]]
    shots_from = ()
    if args["shots_file"]:
        shots_from = read(args["shots_file"])
    tasks.library()
    return dict(examples=examples, shots=args["shots"] or 0, shots_from=shots_from)


def _measured(model: Model, way: str, args: dict, **asked):
    if way == "text":
        return text_perplexity(model, **asked, stride=args["stride"])
    if way == "multiple_choice":
        return multiple_choice(model, **asked)
    return generation(model, **asked, **_given(args, ANSWERS))


def _words(way: str, result: dict) -> str:
    if way == "text":
        rest = f"{result['tokens']:,} tokens in windows of {result['window']:,}, each {result['stride']:,} further"
        lines = [
            ("loss", f"{_sure(result, 'loss')} nats a token"),
            (
                "perplexity",
                f"{_number(result['perplexity'])} a token, {_number(result['word_perplexity'])} a word",
            ),
            ("bits a byte", _number(result["bits_per_byte"])),
        ]
    else:
        rest = f"{result['examples']:,} questions, {result['shots']} shots, {result['truncated']:,} cut on the left"
        last = {"multiple_choice": "by length", "generation": "any last number"}[way]
        lines = [
            ("accuracy", _sure(result, "accuracy")),
            (last, _sure(result, "accuracy_normalised")),
        ]
    table = [f"{name:<16}{value}" for name, value in lines]
    return "\n".join([*table, rest])


def _sure(result: dict, name: str) -> str:
    value = _number(result[name])
    error = result[f"{name}_stderr"]
    if error is None:
        return value
    return f"{value} +- {_number(error)}"


def _number(value: float | None) -> str:
    if value is None:
        return "too large"
    return f"{value:.4f}"
