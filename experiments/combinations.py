"""What combines with what: the table of docs/scope.md, made by the rules that refuse.

    python -m experiments.combinations           # prints the table
    python -m experiments.combinations --write   # into docs/scope.md

Each feature is a few settings of a run. A feature needs what it is refused without, and does not go
with another if the settings of both are refused, but not because of what one of them needs. Nothing
is compiled.
"""

import dataclasses
import functools
import itertools
import pathlib

from experiments import study
from ladder_jax import config
from ladder_jax.errors import UserError

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "scope.md"
TABLE = "combinations"


@dataclasses.dataclass(frozen=True)
class Feature:
    """name: for the table. settings: that turn it on. needs: other settings, without which it is
    refused.
    """

    name: str
    settings: tuple[str, ...]
    needs: tuple[str, ...] = ()

    @property
    def all_settings(self) -> tuple[str, ...]:
        return self.settings + self.needs


def residual(name: str, *needs: str) -> Feature:
    return Feature(f"`{name}`", (f"model.residual={name}",), needs)


def feature(text: str, *needs: str) -> Feature:
    """Named by its settings, separated by spaces."""
    return Feature(f"`{text}`", tuple(text.split()), needs)


EXPERTS = "model.moe={}"
SPLIT = "train.sequence_parallel=true"
START = "train.start=CHECKPOINT"
TENSOR = "mesh.tensor=4"

FEATURES = (
    *map(
        residual,
        "standard ladder ladder-2 ladder-fresh parallel parallel-shared-norm parallel-ladder".split(),
    ),
    residual("desync-2"),
    residual("farskip", EXPERTS),
    residual("no-communication"),
    feature("model.ladder_layers=2"),
    Feature(
        "emulated ranks: `model.ranks=4`",
        ("model.ranks=4", "mesh.tensor=1"),
        ("model.residual=ladder-fresh",),
    ),
    Feature("experts: `model.moe`", (EXPERTS,)),
    feature("model.moe.dense_layers=1", EXPERTS),
    feature("model.moe.capacity=1.25", EXPERTS),
    feature("mesh.experts=exchange", "model.moe.capacity=1.25", SPLIT, TENSOR),
    feature("model.biases=all"),
    feature("model.qk_norm=all-heads"),
    feature("model.tie_embeddings=true"),
    feature("mesh.data=2"),
    feature("mesh.fsdp=2"),
    feature("mesh.tensor=4"),
    feature(SPLIT, TENSOR),
    feature("train.collective_matmul=ring", SPLIT, TENSOR),
    feature("train.interleave=2"),
    feature("train.loop=unrolled"),
    feature("train.remat=full"),
    feature("train.accumulate=2"),
    feature("train.z_loss=1e-4"),
    feature("train.freeze=1", START),
    feature("lora.rank=4", START),
    feature("distill.teacher=start", START),
    feature("distill.hidden_weight=0.1", START, "distill.teacher=start"),
    feature("conversion.steps=10"),
    Feature("side network: `model.side`", ("model.side={reduction: 2}",), (START,)),
)


@functools.cache
def refusal(settings: tuple[str, ...]) -> str | None:
    """Why a run of a small model with these settings is refused."""
    try:
        config.load("tiny", overrides=settings)
    except UserError as error:
        return str(error)
    return None


def are_alternatives(a: Feature, b: Feature) -> bool:
    """Whether they give one setting two values: then they are no pair."""
    values = dict(setting.split("=", 1) for setting in a.all_settings)
    return any(
        values.get(key, value) != value
        for key, value in (one.split("=", 1) for one in b.all_settings)
    )


def together(*settings: str) -> tuple[str, ...]:
    """Each once, and sections before their fields."""
    return tuple(
        sorted(dict.fromkeys(settings), key=lambda setting: setting.partition("=")[0].count("."))
    )


def excluded() -> dict[tuple[str, str], str]:
    """The pairs of features, by name, that do not go together, with the words of the rule that
    refuses.
    """
    reasons = {}
    for a, b in itertools.combinations(FEATURES, 2):
        if are_alternatives(a, b):
            continue
        reason = refusal(together(*a.all_settings, *b.all_settings))
        without = together(*a.needs, *b.all_settings), together(*a.all_settings, *b.needs)
        if reason and not any(map(refusal, without)):
            reasons[a.name, b.name] = reason
    return reasons


def table() -> str:
    pairs = excluded()
    rows = []
    free = []
    for one in FEATURES:
        others = [b if a == one.name else a for a, b in pairs if one.name in (a, b)]
        needs = ", ".join(f"`{setting}`" for setting in one.needs)
        if needs or others:
            rows.append([one.name, needs.replace("model.moe={}", "model.moe"), ", ".join(others)])
        else:
            free.append(one.name)
    rows.append([", ".join(free), "nothing", "nothing"])
    return study.table("feature | needs | does not go with", rows)


def main() -> None:
    parser = study.parser(__doc__, name="combinations")
    parser.add_argument("--write", action="store_true", help="write the table into docs/scope.md")
    parser.add_argument(
        "--reasons", action="store_true", help="print each refused pair with the rule's own words"
    )
    options = parser.parse_args()
    if options.reasons:
        for (a, b), reason in excluded().items():
            print(f"{a} | {b}: {reason}")
    elif options.write:
        study.write(study.fill(PAGE.read_text(), {TABLE: table()}), file=PAGE)
    else:
        print(table())


if __name__ == "__main__":
    main()
