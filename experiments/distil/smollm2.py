"""A real model: SmolLM2's last 15 layers converted, plain and refitted, then retrained on 8,192 tokens or more.

    python -m experiments.distil.smollm2 original=MODEL plain=MODEL refitted=MODEL
        --wikitext FILE --gsm8k FILE --shakespeare FILE [--rows N]

The three models are checkpoints in float32 (see ../refit/README.md). Kept in smollm2.json: a row that is there is not
measured again, and an unfinished run goes on. Retrained models stay in the folder RUNS/NAME/model. --tables makes the
README's table anew from smollm2.json alone.
"""

import argparse
import dataclasses
import json
import pathlib
import shutil
import sys

import numpy as np

from experiments import command, measure
from experiments.distil.plan import Recipe
from experiments.pretrain.figures import Spread
from experiments.pretrain.tables import table
from experiments.readme import fill
from experiments.refit import texts
from ladder_jax import config, evaluate, files, train
from ladder_jax.errors import UserError
from ladder_jax.train import folder

HERE = pathlib.Path(__file__).parent
NAME = "smollm2.json"
STARTS = ("original", "plain", "refitted")
TOKENS, MORE = 8192, 32_768
RATE, LOW = 1e-4, 2e-5
TEXT, TEACHER, BOTH = Recipe.TEXT, Recipe.TEACHER, Recipe.BOTH
BLOCK = 2048  # characters of one text before the next one of the other
SKIPPED = 80_000, 200  # characters of WikiText and records of GSM8K: the refit's calibration is among them
RECORDS, ANSWERED = 2000, 32  # of GSM8K: retrained on before the one, held out the last others


@dataclasses.dataclass(frozen=True)
class Row:
    start: str
    recipe: Recipe = Recipe.NONE
    tokens: int = 0
    rate: float = 0.0  # the peak
    seed: int = 0  # of the order of the text

    @property
    def asked(self) -> dict:
        return {**dataclasses.asdict(self), "recipe": self.recipe.value}

    @property
    def name(self) -> str:
        retrained = [self.recipe.name.lower(), f"{self.tokens}", f"{self.rate:g}", f"seed{self.seed}"]
        return "-".join([self.start, *(retrained if self.tokens else [])])

    @property
    def control(self) -> "Row":
        """The original, retrained likewise. Its own predictions teach it nothing, so there it is the original."""
        return Row("original") if self.recipe in (Recipe.NONE, TEACHER) else dataclasses.replace(self, start="original")


def rows() -> list[Row]:
    """In the order in which they are made: first what decides most."""
    found = [*map(Row, STARTS), Row("refitted", TEACHER, TOKENS, RATE), Row("plain", TEACHER, TOKENS, RATE)]
    found += [Row(start, TEXT, TOKENS, RATE) for start in ("original", "refitted", "plain")]
    found += [Row(start, TEACHER, TOKENS, RATE, seed=1) for start in ("refitted", "plain")]
    found += [Row("refitted", TEACHER, TOKENS, LOW)]
    found += [Row(start, BOTH, TOKENS, RATE) for start in ("original", "refitted")]
    found += [Row(start, TEACHER, MORE, RATE) for start in ("refitted", "plain")]
    return found + [Row(start, TEXT, MORE, RATE) for start in ("original", "refitted")]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.distil.smollm2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="*", metavar="NAME=MODEL", help="original, plain and refitted")
    for name in ("wikitext", "gsm8k", "shakespeare"):
        parser.add_argument(f"--{name}", metavar="FILE")
    parser.add_argument("--rows", type=int, metavar="N", help="only the first N")
    parser.add_argument("--runs", type=pathlib.Path, metavar="DIR", default=pathlib.Path("runs/distil/smollm2"))
    parser.add_argument("--out", type=pathlib.Path, default=HERE, metavar="DIR", help="of smollm2.json")
    parser.add_argument("--tables", action="store_true", help="no runs: the table from smollm2.json")
    args = parser.parse_intermixed_args(argv)

    def work() -> None:
        if not args.tables:
            study(args)
        write_table(args.out)

    return command.ended(work, name="smollm2")


def study(args: argparse.Namespace) -> None:
    from ladder_jax import cli

    cli.prepare_devices(None)
    models = dict(word.partition("=")[::2] for word in args.models)
    if list(models) != list(STARTS):
        raise UserError("name the three models: original=MODEL plain=MODEL refitted=MODEL")
    if missing := [name for name in ("wikitext", "gsm8k", "shakespeare") if not getattr(args, name)]:
        raise UserError(f"--{missing[0]} FILE is missing")
    runs, file = args.runs.expanduser().absolute(), args.out / NAME
    args.out.mkdir(parents=True, exist_ok=True)
    held_out, text = _texts(args, original=models["original"], runs=runs)
    done = json.loads(file.read_text())["rows"] if file.is_file() else []
    for row in rows()[: args.rows]:
        if any(all(one[name] == value for name, value in row.asked.items()) for one in done):
            continue
        print(row.name, flush=True)
        about, model = {}, models[row.start]
        if row.tokens:
            about, model = _retrained(row, models, text=text, place=runs / row.name)
        opened = evaluate.open_model(model, window=texts.HELD_OUT)
        losses = {name: evaluate.perplexity(opened, tokens).loss for name, tokens in held_out.items()}
        done.append({**row.asked, **about, "losses": losses})
        print(f"  {losses}", flush=True)
        environment = {**measure.environment(), "command": "python -m experiments.distil.smollm2"}
        content = json.dumps({**environment, "held_out_tokens": texts.HELD_OUT, "rows": done}, indent=1) + "\n"
        files.write_atomically(str(file), lambda path, content=content: pathlib.Path(path).write_text(content))


def _retrained(row: Row, models: dict[str, str], *, text: pathlib.Path, place: pathlib.Path) -> tuple[dict, str]:
    """Of the run: its steps and seconds, and its model, which computes in float32, as the three that it came from."""
    from ladder_jax.pretrained.convert import command

    recipe, run, model = str(HERE / "smollm2.yaml"), place / "run", place / "model"
    before = config.load(recipe).train
    steps = row.tokens // (before.batch * before.sequence)
    changed = [f"train.start={models[row.start]}", f"data.path={text}", f"run.dir={run}", f"train.seed={row.seed}"]
    changed += [f"train.learning_rate={row.rate}", f"train.steps={steps}", f"train.warmup_steps={steps // 10}"]
    if row.recipe is not TEXT:
        changed += [f"distill.teacher={models['original']}", f"distill.alpha={1.0 if row.recipe is TEACHER else 0.5}"]
    settings = config.load(recipe, overrides=changed)
    if not model.is_dir():
        train.run(settings, say=lambda line: print(f"  {line}", flush=True))
        asked = dict.fromkeys("ladder_layers residual ranks calibration calibration_tokens refit ridge search".split())
        asked |= {"source": str(run), "destination": str(model), "dtype": "float32", "to": "checkpoint"}
        command.run({**asked, "tensor": None, "json": False})
    about = {"steps": steps, "tokens_a_step": before.batch * before.sequence, "seconds": _seconds(run)}
    shutil.rmtree(run / "checkpoints", ignore_errors=True)  # with its moments
    return about, str(model)


def _texts(args: argparse.Namespace, *, original: str, runs: pathlib.Path) -> tuple[dict, pathlib.Path]:
    """({domain: held-out tokens [2049]}, the file to retrain on: WikiText and GSM8K by turns, without those)."""
    tokenizer = evaluate.open_model(original).tokenizer
    loaded = texts.load({name: getattr(args, name, None) for name in texts.DOMAINS}, tokenizer=tokenizer)
    held_out = {name: tokens[0].tolist() for name, tokens in loaded.held_out.items()}
    records = [json.loads(line) for line in pathlib.Path(args.gsm8k).expanduser().read_text().splitlines()]
    sums = ["\n\n".join(f"{row['question']}\n{row['answer']}" for row in part)
            for part in (records[SKIPPED[1] : RECORDS], records[-ANSWERED:])]  # fmt: skip
    held_out["gsm8k"] = np.array(tokenizer.encode(sums[1]))[: texts.HELD_OUT + 1].tolist()
    article = pathlib.Path(args.wikitext).expanduser().read_text()
    parts = article[SKIPPED[0] : len(article) * 9 // 10], sums[0]  # tasks.py asks about the last tenth
    starts = range(0, min(map(len, parts)), BLOCK)
    runs.mkdir(parents=True, exist_ok=True)
    file = runs / "text.txt"
    file.write_text("\n".join(part[start : start + BLOCK] for start in starts for part in parts))
    return held_out, file


def _seconds(run: pathlib.Path) -> float:
    spent = json.loads((run / folder.GOODPUT).read_text())["seconds"]
    return round(sum(seconds for part, seconds in spent.items() if part != "lost"), 1)


def write_table(out: pathlib.Path) -> None:
    """README.md's table (if it is there); printed. Raises UserError where there are no results."""
    file, readme = out / NAME, out / "README.md"
    if not file.is_file():
        raise UserError(f"there is no {str(file)!r}: run the study first, without --tables")
    found = section(json.loads(file.read_text())["rows"])
    print(found)
    if readme.is_file():
        text = fill(readme.read_text(), {"smollm2": found})
        files.write_atomically(str(readme), lambda path: pathlib.Path(path).write_text(text))


def section(results: list[dict]) -> str:
    """A line for each kind of row; the differences are means over the seeds."""
    names = [field.name for field in dataclasses.fields(Row)]
    losses = {}
    for one in results:
        asked = {name: one[name] for name in names} | {"recipe": Recipe(one["recipe"])}
        losses[Row(**asked)] = one["losses"]
    lines = []
    for row in (row for row in losses if row.seed == 0):
        alike = [one for one in losses if dataclasses.replace(one, seed=0) == row]
        lost = lambda domain, other: _less(losses, alike, domain=domain, other=other)
        about = [row.start, row.recipe.value, f"{row.tokens:,}", f"{row.rate:g}", str(len(alike))]
        wikitext = Spread(tuple(losses[one]["wikitext"] for one in alike)).as_text()
        over = [lost(domain, Row("original")) for domain in ("wikitext", "gsm8k", "shakespeare", "python")]
        lines.append([*about, wikitext, *over, lost("wikitext", None), lost("gsm8k", None)])
    head = "start | retrained on | tokens | rate | seeds | WikiText | over the original: WikiText | GSM8K | Shakespeare"
    return table(f"{head} | Python | over the control: WikiText | GSM8K", lines)


def _less(losses: dict, these: list[Row], *, domain: str, other: Row | None) -> str:
    """other: None for each row's control."""
    pairs = [(one, other or one.control) for one in these]
    found = tuple(losses[one][domain] - losses[less][domain] for one, less in pairs if less in losses and less != one)
    return Spread(found).as_text("{:+.3f}") if found else "-"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
