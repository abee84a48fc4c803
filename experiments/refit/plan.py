"""The rows of the study: which layers are converted, to what, and on which text they are refitted."""

import dataclasses
import enum

DOMAINS = ("wikitext", "gsm8k", "shakespeare", "python")
MIXTURE = "mixture"  # a quarter of the calibration tokens from each domain
FRESH_RANKS = 3  # divides the model's 9 heads and 3 key/value heads

# By experiments/convert_smollm2: 15 chosen greedily (greedy.json), 20 and 25 by what each layer costs alone.
SENSITIVE = {
    15: "4,5,6,8,9,10,20,21,22,23,24,25,26,27,28",
    20: "5,6,7,8,9,10,11,13,14,15,16,20,21,22,23,24,25,26,27,28",
    25: "2,4,5,6,7,8,9,10,11,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28",
}


class Way(enum.Enum):
    """What is fitted."""

    NONE = "plain"
    INPUTS = "inputs"  # of the converted sublayers, to the whole inputs of the same model
    ORIGINAL = "inputs, to the original's"  # to the inputs that the original model has there
    SCALES = "one factor a component"  # diagonal matrices: how much is only scale?
    CONTROL = "inputs of the original"  # all sublayers of the standard model, whose inputs are whole
    FISHER = "inputs, tokens by squared gradient"  # of the loss with respect to the original's input there
    GRADIENT = "inputs, tokens by gradient"  # by that gradient's norm
    OUTPUTS = "inputs and outputs"  # the output projections too: `--refit both`
    STREAM = "inputs and outputs, to the original's"  # the output projections too, to the original's stream
    # By gradient descent on the same text, a step a row (trained.py):
    TRAINED = "inputs, then trained on"  # the fitted projections alone
    DISTILLED = "inputs, then all weights trained"
    # These change the program, so they are no checkpoints:
    PREVIOUS = "inputs, from two tokens"  # from the previous token's late input too
    LOW_RANK = "map of rank 64 before the norm"  # an addition to the late stream


STEPS = (Way.TRAINED, Way.DISTILLED)
NEW = (Way.OUTPUTS, Way.STREAM, Way.FISHER, Way.GRADIENT, Way.PREVIOUS, Way.LOW_RANK)


@dataclasses.dataclass(frozen=True)
class Row:
    """layers: as `--ladder-layers`; of the original model, "0". text, tokens, seed: of the calibration. scored: the
    domains whose held-out text is scored.
    """

    layers: str = "15"
    residual: str = "ladder"
    way: Way = Way.INPUTS
    text: str = "wikitext"
    tokens: int = 12_288
    seed: int = 0
    ridge: float = 1e-3
    scored: tuple[str, ...] = DOMAINS[:1]

    @property
    def asked(self) -> dict:
        """What tells rows apart, as JSON."""
        row = {"layers": self.layers, "residual": self.residual, "way": self.way.value, "scored": list(self.scored)}
        if self.way is Way.NONE:
            return row
        return {**row, "text": self.text, "tokens": self.tokens, "seed": self.seed, "ridge": self.ridge}


def rows() -> list[Row]:
    """In the order in which they are measured: first what decides most."""
    half, every, delayed, sensitive = Row(), Row(layers="30"), Row(residual="ladder-2"), Row(layers=SENSITIVE[15])
    fresh, parallel = Row(residual="ladder-fresh"), Row(residual="parallel-ladder")
    original = Row(layers="0", way=Way.NONE)
    change, plain = dataclasses.replace, lambda row: dataclasses.replace(row, way=Way.NONE)
    mixed = lambda row: change(row, text=MIXTURE)
    long = lambda row: change(mixed(row), tokens=32_768)
    on_all = lambda row: change(row, scored=DOMAINS)
    more_sensitive = [change(half, layers=SENSITIVE[count]) for count in (20, 25)]
    return [
        *map(on_all, (original, plain(half), half)),
        *(row for one in (every, delayed) for row in (plain(one), one)),
        on_all(mixed(half)),
        change(original, way=Way.CONTROL, tokens=4096),
        *(change(half, seed=seed) for seed in (1, 2)),
        *(change(half, ridge=ridge) for ridge in (1e-2, 1e-4)),
        *(row for one in (fresh, parallel) for row in (plain(one), one)),
        *(change(half, way=way) for way in NEW),
        *(change(half, way=way, seed=seed) for seed in (0, 1, 2) for way in STEPS),
        *(change(half, way=Way.OUTPUTS, seed=seed) for seed in (1, 2)),
        *(change(one, way=Way.OUTPUTS) for one in (every, delayed)),
        *(change(half, way=Way.OUTPUTS, tokens=tokens) for tokens in (4096, 32_768)),
        on_all(change(mixed(half), way=Way.OUTPUTS)),
        *(change(half, tokens=tokens) for tokens in (4096, 32_768)),
        change(half, way=Way.ORIGINAL),
        *map(on_all, (plain(sensitive), sensitive)),
        change(half, way=Way.SCALES),
        *(row for one in more_sensitive for row in (plain(one), one)),
        change(half, tokens=2048),
        *(change(half, way=way, ridge=1e-2) for way in (Way.OUTPUTS, Way.STREAM)),
        *(on_all(change(mixed(half), way=way)) for way in NEW if way is not Way.OUTPUTS),
        *(on_all(change(long(half), way=Way.OUTPUTS, ridge=ridge)) for ridge in (1e-3, 1e-2)),
        on_all(long(half)),
        *(on_all(change(half, text=text)) for text in DOMAINS[1:]),
        *(change(mixed(half), seed=seed) for seed in (1, 2)),
        *map(on_all, (plain(every), plain(delayed), long(every), long(delayed), long(sensitive))),
        *(change(half, tokens=tokens, ridge=ridge) for tokens, ridge in ((2048, 1e-2), (32_768, 1e-4), (2048, 1e-1))),
        *(change(every, seed=seed) for seed in (1, 2)),
        *(row for one in (delayed, parallel) for row in (plain(change(one, layers="30")), change(one, layers="30"))),
        *(change(half, tokens=tokens) for tokens in (65_536, 131_072, 262_144)),
    ]
