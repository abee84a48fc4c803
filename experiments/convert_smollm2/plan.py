"""The arms of the study: which layers of the model are converted, to what, and how they are retrained."""

import dataclasses
import enum
import pathlib
from collections.abc import Sequence

from ladder_jax.errors import UserError, unknown
from ladder_jax.pretrained.sensitivity import Search

HERE = pathlib.Path(__file__).parent
FRESH_RANKS = 3  # divides the model's 9 heads and 3 key/value heads


class Way(enum.Enum):
    """How an arm is retrained. All weights train, on the same tokens in the same order."""

    NONE = "not retrained"
    TOKENS = "text"  # cross-entropy on the next token
    TEACHER = "original's predictions"  # KL divergence from the original model's
    GRADUAL = "text, layers turned gradually"  # from the top, over two thirds of the steps


@dataclasses.dataclass(frozen=True)
class Choice:
    """`count` layers: the last ones, or the least sensitive. Of the original model none."""

    how: str  # "last" or "sensitive"
    count: int


@dataclasses.dataclass(frozen=True)
class Arm:
    """residual: of the chosen layers; the others are standard. choice: None for the original."""

    choice: Choice | None
    residual: str
    way: Way

    @property
    def name(self) -> str:
        """Such as "last-15-ladder-text", for folders, results and --arms."""
        layers = [self.choice.how, str(self.choice.count), self.residual] if self.choice else ["original"]
        return "-".join([*layers, *([] if self.way is Way.NONE else [self.way.name.lower()])])

    @property
    def ranks(self) -> int | None:
        return FRESH_RANKS if self.residual == "ladder-fresh" else None

    def ladder_layers(self, order: Sequence[int], *, num_layers: int) -> str | None:
        """As the model's configuration names them; order: the layers, the least sensitive first."""
        if self.choice is None:
            return None
        if self.choice.how == "last" or self.choice.count == num_layers:
            return str(self.choice.count)
        return ",".join(map(str, sorted(order[: self.choice.count])))


@dataclasses.dataclass(frozen=True)
class Size:
    """What apart from NAME.yaml sets the small version and the full one apart.

    calibration: tokens of the training text on which the layers' sensitivity is measured. gradual_groups: see
    ConversionConfig. questions: of the continuation task, each a paragraph's first `context` words and its next
    `continuation` words. worked: of --questions. all_retrained: every choice of layers, not half of them alone.
    """

    name: str
    seeds: int
    calibration: int
    search: Search
    gradual_groups: int
    questions: int
    context: int
    continuation: int
    worked: int
    all_retrained: bool


SIZES = {
    "small": Size("small", 1, 1024, Search.RANKED, 3, 32, 12, 6, 4, False),
    "full": Size("full", 3, 8192, Search.GREEDY, 5, 500, 48, 12, 200, True),
}


def size(name: str) -> Size:
    if name not in SIZES:
        raise unknown("size", name, SIZES)
    return SIZES[name]


def counts(num_layers: int) -> list[int]:
    """A third, half, two thirds, and all of the layers."""
    return list(dict.fromkeys([num_layers // 3, num_layers // 2, num_layers * 2 // 3, num_layers]))


def arms(size: Size, *, num_layers: int, only: Sequence[str] = ()) -> list[Arm]:
    """In the order in which they are made: first what needs no training. only: those names; empty for all.

    Raises UserError for other names.
    """
    if num_layers < 3:
        raise UserError(f"the study converts a third of a model's layers; this one has {num_layers}")
    half = Choice("last", num_layers // 2)
    last = [Choice("last", count) for count in counts(num_layers)]
    sensitive = [Choice("sensitive", choice.count) for choice in last if choice.count < num_layers]
    original = Arm(None, "standard", Way.NONE)
    plain = [original, *(Arm(choice, "ladder", Way.NONE) for choice in (*last, *sensitive))]
    kinds = [Arm(choice, kind, Way.NONE) for kind in ("ladder-fresh", "ladder-2") for choice in (half, last[-1])]
    found = [*plain, *kinds, dataclasses.replace(original, way=Way.TOKENS)]
    found += [Arm(half, "ladder", Way.TOKENS), Arm(Choice("sensitive", half.count), "ladder", Way.TOKENS)]
    found += [Arm(half, "ladder", way) for way in (Way.TEACHER, Way.GRADUAL)]
    if size.all_retrained:
        found += [dataclasses.replace(arm, way=Way.TOKENS) for arm in (*plain[1:], kinds[0], kinds[1])]
        found.append(Arm(last[-1], "ladder", Way.GRADUAL))
    by_name = {arm.name: arm for arm in found}
    for name in only:
        if name not in by_name:
            raise unknown("arm", name, by_name)
    return [arm for arm in by_name.values() if not only or arm.name in only]
