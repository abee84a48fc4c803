"""The rows of the study: which layers are converted, from which start, and on what they are retrained for how long."""

import dataclasses
import enum

from ladder_jax.errors import unknown

SIZES = ("small", "full")
SEEDS = (0, 1, 2)
SHARES = (0.5, 1.0, 2.0, 5.0, 10.0)  # of the tokens of pretraining, in percent
RATE = 1 / 3  # the peak of the learning rate, over pretraining's
RATES = (1 / 9, RATE, 1.0)
CALIBRATION = 16_384  # tokens of a refit; the first ones of the text to retrain on
MEASURED = 4096  # tokens on which the layers are chosen


class Layers(enum.Enum):
    """Which layers are converted."""

    NONE = "original"
    LAST = "last half"
    CHOSEN = "least sensitive half"  # greedily, by what they cost refitted
    ALL = "all"


class Start(enum.Enum):
    """The weights that retraining starts from."""

    PLAIN = "plain"  # the original's
    REFITTED = "refitted"


class Recipe(enum.Enum):
    """What all weights are retrained on."""

    NONE = "not retrained"
    TEXT = "text"  # cross-entropy on the next token
    TEACHER = "original's predictions"  # KL divergence from them
    BOTH = "both"  # half each


@dataclasses.dataclass(frozen=True)
class Row:
    """share: of pretraining's tokens, in percent. rate: the peak of the learning rate, over pretraining's."""

    seed: int = 0
    layers: Layers = Layers.NONE
    start: Start = Start.PLAIN
    recipe: Recipe = Recipe.NONE
    share: float = 0.0
    rate: float = RATE

    @property
    def asked(self) -> dict:
        """What tells rows apart, as JSON."""
        row = {"seed": self.seed, "layers": self.layers.value, "start": self.start.value, "recipe": self.recipe.value}
        return row if self.recipe is Recipe.NONE else {**row, "share": self.share, "rate": round(self.rate, 4)}

    @property
    def name(self) -> str:
        """Of the row's folder, such as "last-refitted-text-5-x0.333"."""
        words = [self.layers.name.lower(), self.start.value]
        retrained = [self.recipe.name.lower(), f"{self.share:g}", f"x{self.rate:.3g}"]
        return "-".join(words if self.recipe is Recipe.NONE else [*words, *retrained])


def check(size: str) -> str:
    """Raises UserError for a size that there is not."""
    if size not in SIZES:
        raise unknown("size", size, SIZES)
    return size


def rows() -> list[Row]:
    """In the order in which they are made: first what decides most. Every retrained row's control comes before it."""
    recipes = (Recipe.TEXT, Recipe.TEACHER, Recipe.BOTH)
    converted = [(layers, start) for layers in (Layers.LAST, Layers.ALL, Layers.CHOSEN) for start in Start]

    def plain(seed: int) -> list[Row]:
        return [Row(seed), *(Row(seed, layers, start) for layers, start in converted)]

    def retrained(seed: int, share: float, *layers: Layers, rate: float = RATE) -> list[Row]:
        """Layers.NONE: the controls."""
        starts = lambda one: (Start.PLAIN,) if one is Layers.NONE else Start
        return [
            Row(seed, one, start, recipe, share, rate) for one in layers for start in starts(one) for recipe in recipes
        ]

    half = (Layers.NONE, Layers.LAST)
    found = [*plain(0), *retrained(0, 1.0, *half), *retrained(0, 5.0, *half)]
    for seed in SEEDS[1:]:
        found += [*plain(seed), *retrained(seed, 1.0, *half), *retrained(seed, 5.0, *half)]
    for rate in RATES:
        found += retrained(0, 5.0, *half, rate=rate) if rate != RATE else []
    for share in (10.0, 2.0):
        found += retrained(0, share, *half)
    for share in (1.0, 5.0):
        for layers in (Layers.ALL, Layers.CHOSEN):
            found += [row for seed in SEEDS for row in retrained(seed, share, layers)]
    for share in (10.0, 2.0, 0.5):
        found += [row for seed in SEEDS for row in retrained(seed, share, *half, Layers.ALL, Layers.CHOSEN)]
    return list(dict.fromkeys(found))  # a row stands where it is named first
