"""Tasks, not only loss: each model's continuations, and its worked answers to sums that it was not calibrated on.

    python -m experiments.refit.tasks --wikitext FILE --gsm8k FILE NAME=MODEL [NAME=MODEL ...]

MODEL is what `ladder-jax evaluate` takes; the first one is what the others are compared with. Kept in tasks.json: a
model that is there is not measured again, unless the questions are others.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys

import numpy as np

from experiments import command, measure
from experiments.convert_smollm2 import questions
from ladder_jax import evaluate, files
from ladder_jax.errors import UserError

HERE = pathlib.Path(__file__).parent
NAME = "tasks.json"
WINDOW = 1024
CONTEXT, CONTINUATION = 12, 6  # words


@dataclasses.dataclass(frozen=True)
class Answers:
    """Of each worked answer, after its question: its log-likelihood in nats, and its tokens."""

    loglikelihoods: list[float]
    tokens: list[int]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.refit.tasks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL", help="such as original=SmolLM2.gguf")
    parser.add_argument("--wikitext", metavar="FILE", required=True, help="its last tenth makes the continuations")
    parser.add_argument("--gsm8k", metavar="FILE", required=True, help="JSON lines; the last ones are answered")
    parser.add_argument("--continuations", type=int, default=48, metavar="N")
    parser.add_argument("--answers", type=int, default=32, metavar="N")
    parser.add_argument("--out", type=pathlib.Path, default=HERE, metavar="DIR", help="of tasks.json")
    args = parser.parse_args(argv)
    return command.ended(lambda: study(args), name="tasks")


def study(args: argparse.Namespace) -> None:
    from ladder_jax import cli

    cli.prepare_devices(None)
    models = [word.partition("=")[::2] for word in args.models]
    if wrong := [word for word, (_, model) in zip(args.models, models) if not model]:
        raise UserError(f"{wrong[0]!r}: name each model, NAME=MODEL")
    args.out.mkdir(parents=True, exist_ok=True)
    choices, file = args.out / "continuations.jsonl", args.out / NAME
    text = _read(args.wikitext)
    shape = dict(count=args.continuations, context=CONTEXT, continuation=CONTINUATION)
    questions.write(text[len(text) * 9 // 10 :], **shape, file=choices)
    worked = [json.loads(line) for line in _read(args.gsm8k).splitlines()[-args.answers :]]
    asked = {"continuations": args.continuations, "answers": args.answers}
    about = {**measure.environment(), "command": "python -m experiments.refit.tasks", **asked, "models": []}
    if file.is_file():
        before = json.loads(file.read_text())
        about["models"] = before["models"] if all(before[name] == value for name, value in asked.items()) else []
    for name, model in models:
        if any(row["name"] == name for row in about["models"]):
            continue
        opened = evaluate.open_model(model, window=WINDOW)
        chosen = evaluate.multiple_choice(opened, evaluate.read_choices(str(choices)))
        row = {"name": name, "continuation": dataclasses.asdict(chosen)}
        about["models"].append(row | {"worked": dataclasses.asdict(answers(opened, worked))})
        print(name, row["continuation"], flush=True)
        content = json.dumps(about, indent=1) + "\n"
        files.write_atomically(str(file), lambda path, content=content: pathlib.Path(path).write_text(content))
    choices.unlink()


def answers(model: evaluate.Model, worked: list[dict]) -> Answers:
    spans = [model.pair(f"{row['question']}\n", row["answer"]) for row in worked]
    found = dict(model.scorer.scores([model.cut(span) for span in spans]))
    scores = [found[index].loglikelihood for index in range(len(spans))]
    return Answers(scores, [len(span.scored) for span in spans])


def loss(these: dict, *, less: dict | None = None) -> tuple[float, float]:
    """(nats a token of the answers, its standard error), or those of the difference from another model's, on the same
    answers. A ratio of sums, whose error is Cochran's (Sampling Techniques, 1977, section 6.4).
    """
    tokens = np.array(these["tokens"], float)
    nats = -np.array(these["loglikelihoods"])
    if less is not None:
        nats = nats + np.array(less["loglikelihoods"])
    ratio, count = nats.sum() / tokens.sum(), len(tokens)
    left = nats - ratio * tokens
    return float(ratio), math.sqrt((left**2).sum() / (count - 1) / count) / tokens.mean()


def _read(path: str) -> str:
    try:
        return pathlib.Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path!r}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
