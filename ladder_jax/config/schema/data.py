"""The section `data`."""

import dataclasses
import enum

from ladder_jax.config.schema.checks import check, check_positive
from ladder_jax.config.schema.typed import fit


class Format(enum.Enum):
    """What lies at `data.path`."""

    TEXT = "text"  # text, a token store, or a mixture: every token is predicted
    EXAMPLES = "examples"  # JSON lines of chats, prompts with completions, and texts (see data/examples/)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """`path`: a text file, a folder of them, or `stdlib` for the source of Python's own library; or what
    `ladder-jax tokenize` made, or a .yaml file with a mixture of those (see data/mixture.py).

    `max_bytes`, `tokenizer` (`bytes`, or a folder with a Hugging Face tokenizer.json): of text; a token store
    has been tokenized already.

    `format`: `examples` for JSON lines whose answers alone are learnt, to be found at `path` as a file or in a folder.
    """

    path: str = "stdlib"
    tokenizer: str = "bytes"
    max_bytes: int = 32_000_000
    validation_fraction: float = 0.05
    format: Format = Format.TEXT

    def __post_init__(self):
        fit(self, "data")
        check_positive(self, "data", "max_bytes")
        check(
            0 < self.validation_fraction < 1,
            f"data.validation_fraction must be between 0 and 1, not {self.validation_fraction}",
        )
