"""The rows of the study: which layers are converted, to what, and on which text they are refitted."""

import dataclasses
import enum

DOMAINS = ("wikitext", "gsm8k", "shakespeare", "python")
MIXTURE = "mixture"  # a quarter of the calibration tokens from each domain
FRESH_RANKS = 3  # divides the model's 9 heads and 3 key/value heads

LAST = {15: "15", 20: "20", 25: "25", 30: "30"}
# By one layer after another, then (16 to 20, 25) by what each costs alone: experiments/convert_smollm2.
SENSITIVE = {
    15: "4,5,6,8,9,10,20,21,22,23,24,25,26,27,28",
    20: "5,6,7,8,9,10,11,13,14,15,16,20,21,22,23,24,25,26,27,28",
    25: "2,3,4,5,6,7,8,9,10,11,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28",
}


class Way(enum.Enum):
    """What is fitted."""

    NONE = "plain"
    INPUTS = "inputs"  # of the converted sublayers, to the whole inputs of the same model
    ORIGINAL = "inputs, to the original's"  # to the inputs that the original model has there
    SCALES = "one factor a component"  # diagonal matrices: how much is only scale?
    CONTROL = "inputs of the original"  # all sublayers of the standard model, whose inputs are whole


@dataclasses.dataclass(frozen=True)
class Row:
    """layers: as `--ladder-layers`; of the original model, "0". text, tokens, seed: of the calibration."""

    layers: str = "15"
    residual: str = "ladder"
    way: Way = Way.INPUTS
    text: str = "wikitext"
    tokens: int = 12_288
    seed: int = 0
    ridge: float = 1e-3

    @property
    def asked(self) -> dict:
        """What tells rows apart, as JSON."""
        row = {"layers": self.layers, "residual": self.residual, "way": self.way.value}
        if self.way is Way.NONE:
            return row
        return {**row, "text": self.text, "tokens": self.tokens, "seed": self.seed, "ridge": self.ridge}


def rows() -> list[Row]:
    """In the order in which they are measured: first what decides most."""
    plain = lambda **changes: Row(way=Way.NONE, **changes)
    kinds = [("30", "ladder"), ("15", "ladder-2"), ("15", "ladder-fresh"), ("15", "parallel-ladder")]
    of_kind = lambda make, **more: [make(layers=layers, residual=kind, **more) for layers, kind in kinds]
    sensitive = lambda make, **more: [make(layers=layers, **more) for layers in SENSITIVE.values()]
    mixture = dict(text=MIXTURE, tokens=32_768)
    found = [
        plain(layers="0"),
        plain(),
        Row(),
        *of_kind(plain)[:2],
        *of_kind(Row)[:2],
        Row(layers="0", way=Way.CONTROL),
        Row(seed=1),
        Row(seed=2),
        Row(text=MIXTURE),
        *of_kind(plain)[2:],
        *of_kind(Row)[2:],
        *(row for pair in zip(sensitive(plain), sensitive(Row)) for row in pair),
        *(Row(ridge=ridge) for ridge in (1e-4, 1e-2, 1e-1)),
        *(Row(tokens=tokens) for tokens in (2048, 4096, 32_768)),
        Row(way=Way.ORIGINAL),
        Row(way=Way.SCALES),
        *(Row(text=text) for text in DOMAINS[1:]),
        Row(**mixture),
        Row(layers=SENSITIVE[15], **mixture),
        *of_kind(Row, **mixture),
        *(Row(tokens=tokens, ridge=ridge) for tokens, ridge in ((2048, 1e-2), (32_768, 1e-4), (2048, 1e-1))),
        *(Row(tokens=tokens) for tokens in (65_536, 131_072, 262_144)),
        *(Row(layers="30", seed=seed) for seed in (1, 2)),
    ]
    return list(dict.fromkeys(found))
