"""The texts: of each domain the first tokens are held out, and what follows is calibrated on."""

import dataclasses
import json
import pathlib
import sysconfig

import numpy as np

from experiments.refit.plan import DOMAINS, MIXTURE
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError

HELD_OUT = 2048  # predicted tokens, one window
SEQUENCE = 1024  # of the calibration's rows


@dataclasses.dataclass(frozen=True)
class Texts:
    """held_out: by domain, tokens [1, HELD_OUT + 1]. rest: by domain, rows [n, SEQUENCE] of the text after them."""

    held_out: dict[str, np.ndarray]
    rest: dict[str, np.ndarray]

    def calibration(self, text: str, *, tokens: int, seed: int) -> np.ndarray:
        """Rows [n, SEQUENCE] chosen at random, without repetition; of a mixture equally many from each domain.

        Raises UserError where the text has too few.
        """
        chance, domains = np.random.default_rng(seed), DOMAINS if text == MIXTURE else (text,)
        count = tokens // SEQUENCE // len(domains)
        for domain in domains:
            if len(self.rest[domain]) < count:
                raise UserError(f"{domain} has {len(self.rest[domain])} rows to calibrate on; {count} are asked for")
        chosen = [chance.choice(self.rest[domain], count, replace=False) for domain in domains]
        return np.concatenate(chosen)


def load(files: dict[str, str | None], *, tokenizer: Tokenizer) -> Texts:
    """files: by domain; Python's are those of the standard library. Raises UserError for one that cannot be read."""
    held_out, rest = {}, {}
    for domain in DOMAINS:
        tokens = np.array(tokenizer.encode(_text(domain, files[domain])), np.int32)
        if len(tokens) < HELD_OUT + 1 + SEQUENCE:
            raise UserError(f"--{domain}: {len(tokens)} tokens are too few")
        held_out[domain] = tokens[None, : HELD_OUT + 1]
        after = tokens[HELD_OUT + 1 :]
        rest[domain] = after[: len(after) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)
    return Texts(held_out, rest)


def _text(domain: str, file: str | None) -> str:
    if domain == "python":
        folder = pathlib.Path(file or sysconfig.get_path("stdlib"))
        paths = sorted(folder.glob("*.py"), key=lambda path: path.name)
        return "\n\n".join(path.read_text(encoding="utf-8") for path in paths)[:2_000_000]
    try:
        text = pathlib.Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read --{domain} {file!r}: {error.strerror}") from None
    if domain != "gsm8k":
        return text
    questions = [json.loads(line) for line in text.splitlines()[:2000]]
    return "\n\n".join(f"{row['question']}\n{row['answer']}" for row in questions)
