"""Draws one legitimate configuration: settings as on the command line, a batch's form, and what is
compared.

Case (SEED, INDEX) is a function of these two numbers. Setting by setting, a value is drawn that the
rules of `ladder-jax train` accept beside those before it. What only the reference cannot follow is
left out here.
"""

import dataclasses
import itertools
import json
import math
import random
from typing import Any

from ladder_jax import config
from ladder_jax.errors import UserError

DEVICES = 8
DENSE = (
    "standard ladder ladder-2 ladder-3 ladder-fresh parallel parallel-shared-norm parallel-ladder desync-2 desync-3"
    " no-communication"
).split()
EXPERTS = "standard ladder ladder-2 farskip farskip farskip parallel parallel-shared-norm parallel-ladder".split()
CHECKS = {"inference": 0.3, "another mesh": 0.25, "resumed": 0.12, "evaluated": 0.15}
"""And of how many cases each is."""

# Small, and divided by every mesh. The first moment is half a gradient, exactly, and nothing is clipped.
BASE = {
    "model.num_heads": 24,
    "model.num_kv_heads": 24,
    "model.head_dim": 4,
    "model.d_ff": 48,
    "model.dtype": "float32",
    "model.residual_dtype": "float32",
    "train.batch": 24,
    "train.sequence": 24,
    "train.beta1": 0.5,
    "train.clip_norm": 1e30,
    "train.steps": 2,
    "train.warmup_steps": 0,
}
OF_EXPERTS = {"model.moe.top_k": 1, "model.moe.shared_width": 0, "model.moe.shared_gate": False}

# What is drawn, in this order; what stands twice is drawn more often.
MODEL = {
    "model.num_layers": [2, 2, 2, 3, 3, 4, 5],
    "model.d_model": [16, 16, 24, 32],
    "model.vocab_size": [37, 48, 61],
    "model.biases": ["none", "none", "qkv", "attention", "all"],
    "model.qk_norm": [False, False, True, "all-heads"],
    "model.tie_embeddings": [False, False, True],
    "model.rope_theta": [10_000.0, 100.0],
    "model.rope_scaling": [None, None, None, None, "{factor: 8.0, original_context: 16}"],
    "model.ladder_layers": [None] * 8 + [0, 1, 2, 3, "[0]", "[1]", "[0, 2]", "[1, 3]"],
}
MOE = {
    "model.moe.experts": [1, 2, 3, 3, 4, 4, 5, 6],
    "model.moe.top_k": [1, 2, 3, 4],
    "model.moe.expert_width": [8, 16],
    "model.moe.softmax": ["chosen", "all"],
    "model.moe.router_bias": [False, False, True],
    "model.moe.shared_width": [0, 24, 48],
    "model.moe.dense_layers": [0, 0, 0, 1],
    "train.load_balance": [0.0, 0.3],
    "train.router_z_loss": [0.0, 0.02],
}
MESH = {
    "mesh.tensor": [1, 1, 1, 2, 2, 2, 4, 4, 8, 3],
    "model.ranks": [None, 1, 2, 3, 4],
    "mesh.data": [1, 2, 4, 8],
    "mesh.fsdp": [1, 2, 4, 8],
}
SHAPE = {
    "model.head_dim": [4, 6, 8],  # a norm over two elements magnifies what is rounded
    "model.d_ff": [20, 24, 32, 48],
    "train.batch": [4, 6, 8],
    "train.z_loss": [0.0, 0.0, 0.01],
    "train.loss_chunk": [3, 5, 2048],
}
HEADS = [
    {"model.num_heads": heads, "model.num_kv_heads": kv}
    for heads in (1, 2, 3, 4, 6, 8)
    for kv in range(1, heads + 1)
]
PROGRAM = {
    "train.loop": ["scan", "scan", "unrolled"],
    "train.remat": ["none", "none", "full", "save-matmuls", "offload"],
}
# with another order of a batch's rows
PARTS = {
    "train.sequence_parallel": [False, False, True],
    "train.collective_matmul": ["none", "ring"],
    "train.accumulate": [1, 1, 2, 3, 4],
    "train.interleave": [1, 1, 2],
}
WHOLE = {name: values[0] for name, values in PARTS.items()}
RETRAINING = {"train.freeze": [0, 0, 0, 1, 2, 3, 4]}
CONVERSION = [{}] * 4 + [
    {"conversion.steps": 4, "conversion.groups": groups, "conversion.pace": pace}
    for groups in (1, 2)
    for pace in ("ramp", "jump")
]
LORA = [{}] * 5 + [
    {"lora.rank": rank, "lora.alpha": 4.0, "lora.targets": targets}
    for rank, targets in ((2, "all"), (3, "all"), (2, "query,value"), (3, "gate,down"), (2, "out"))
]


@dataclasses.dataclass(frozen=True)
class Case:
    """settings, other: dotted settings of two runs, of which the second has another mesh; its
    checks read it.

    preset: what the settings change. teacher: dotted settings of the teacher's model, if it is not
        the start's.
    batch: "plain" tokens, or "packed" documents, or those with a "masked" loss. checks: of CHECKS.
    drops: whether an expert may run out of capacity; then the order of rows counts. step: how many
        were made before.
    """

    seed: int
    index: int
    preset: str
    settings: dict[str, Any]
    other: dict[str, Any]
    teacher: dict[str, Any]
    batch: str
    checks: tuple[str, ...]
    drops: bool
    step: int
    inference: dict[str, Any]

    @property
    def dotted(self) -> str:
        """The settings as arguments of `ladder-jax train`."""
        return " ".join([self.preset, *map(override, self.settings.items())])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """what: "ran", "refused" or "failed". said: why. done: which checks were made. seconds: of the
    whole case.
    """

    what: str
    said: str = ""
    done: tuple[str, ...] = ()
    seconds: float = 0.0


def override(setting: tuple[str, Any]) -> str:
    name, value = setting
    word = value is None or isinstance(value, bool)
    return f"{name}={json.dumps(value) if word else value}"


class Draft:
    """Settings in the making, of which the rules accept all."""

    def __init__(self, rng: random.Random, preset: str, settings: dict[str, Any]):
        self.rng, self.preset, self.settings = rng, preset, settings

    def take(self, *options: dict[str, Any]) -> None:
        """One of these, unless the rules refuse all."""
        for option in self.rng.sample(options, len(options)):
            changed = self.settings | option
            sizes = [changed.get(f"mesh.{axis}", 1) for axis in ("data", "fsdp", "tensor")]
            if math.prod(sizes) <= DEVICES and legitimate(self.preset, changed):
                self.settings = changed
                return

    def take_each(self, table: dict[str, list]) -> None:
        for name, values in table.items():
            self.take(*({name: value} for value in values))


def legitimate(preset: str, settings: dict[str, Any]) -> bool:
    try:
        config.load(preset, overrides=[*map(override, settings.items())])
    except UserError:
        return False
    return True


def draw(seed: int, index: int) -> Case:
    rng = random.Random(f"{seed} {index}")
    of_experts = rng.random() < 0.3
    preset, base = ("tiny-moe", BASE | OF_EXPERTS) if of_experts else ("tiny", BASE)
    residual = rng.choice(EXPERTS if of_experts else DENSE)
    draft = Draft(rng, preset, base | {"model.residual": residual})
    draft.take_each(MODEL | MOE if of_experts else MODEL)
    if rng.random() < 0.12:
        draft.take({"model.dtype": "bfloat16", "model.residual_dtype": "bfloat16"})
    draft.take_each(MESH)
    draft.take(*HEADS)
    draft.take_each(SHAPE)
    drops = of_experts and capacity(draft)
    draft.take_each(PROGRAM if drops else PARTS | PROGRAM)
    draft.take(*({"train.sequence": length} for length in range(6, 11)))
    teacher = retraining(draft) if rng.random() < 0.3 else {}
    settings = draft.settings
    return Case(
        seed,
        index,
        preset=preset,
        settings=settings,
        other=another(draft, teacher, drops),
        teacher=teacher,
        batch=rng.choice(["plain", "plain", "packed", "masked"]),
        checks=tuple(check for check, share in CHECKS.items() if rng.random() < share),
        drops=drops,
        step=rng.randrange(5) if "conversion.steps" in settings else 0,
        inference=inference(rng, settings, halves=splits(residual) and not drops),
    )


def capacity(draft: Draft) -> bool:
    """Draws the experts' capacity, and whether they are exchanged; whether one may run out of it."""
    chosen = draft.settings["model.moe.experts"] / draft.settings["model.moe.top_k"]
    if draft.settings["model.moe.shared_width"]:
        draft.take({}, {"model.moe.shared_gate": True})
    draft.take({}, {}, {}, *({"model.moe.capacity": most} for most in (chosen, chosen, 0.8)))
    draft.take({}, {"mesh.experts": "exchange", "train.sequence_parallel": True})
    return draft.settings.get("model.moe.capacity", chosen) < chosen


def reduces(residual: str) -> bool:
    """Whether each sublayer's output is reduced."""
    return not residual.startswith(("desync", "no-communication"))


def of_mesh(residual: str) -> bool:
    """Whether another mesh computes another function, where nobody says how many ranks it is of."""
    return residual == "ladder-fresh" or not reduces(residual)


def splits(residual: str) -> bool:
    """Whether its batch is taken in halves, and its stream split."""
    return reduces(residual) and residual != "farskip"


def retraining(draft: Draft) -> dict[str, Any]:
    """Frozen layers, low-rank factors and a teacher; returns the teacher's own settings."""
    rng, student = draft.rng, draft.settings["model.residual"]
    draft.take({"train.start": "START"})
    draft.take(*CONVERSION)
    draft.take_each(RETRAINING)
    draft.take(*LORA)
    if rng.random() < 0.55:
        return {}
    split = (
        draft.settings.get("train.sequence_parallel") or draft.settings.get("train.interleave") == 2
    )
    shared = "parallel-shared-norm"
    names = EXPERTS if draft.preset == "tiny-moe" else DENSE
    alike = [n for n in names if (n == shared) == (student == shared) and (splits(n) or not split)]
    taught = {"distill.teacher": rng.choice(["start", "TEACHER"]), "train.z_loss": 0.0}
    teacher = {}
    taught |= {
        "distill.temperature": rng.choice([1.0, 2.0]),
        "distill.alpha": rng.choice([1.0, 0.7]),
    }
    if taught["distill.teacher"] == "start" or rng.random() < 0.3:
        others = [n for n in alike if n != student and not of_mesh(n)]
        taught["distill.residual"] = rng.choice(others or alike)
    else:
        teacher = dict.fromkeys(("model.ladder_layers", "model.ranks"))
        teacher["model.residual"] = rng.choice(alike)
    draft.take(taught)
    # the reference's streams are of layers that have turned
    turned = "conversion.steps" not in draft.settings
    if turned and reduces(student) and rng.random() < 0.3:
        draft.take({"distill.hidden_weight": 0.5, "distill.hidden_every": rng.choice([1, 2])})
    return teacher


def another(draft: Draft, teacher: dict[str, Any], drops: bool) -> dict[str, Any]:
    """Another mesh and form of the same function of the same batch; where rows drop, another form
    only.
    """
    settings, other = draft.settings, Draft(draft.rng, draft.preset, dict(draft.settings))
    residual = settings["model.residual"]
    tensor = settings["mesh.tensor"]
    if not drops:
        other.settings |= WHOLE
        if "mesh.experts" in settings:
            other.settings["train.sequence_parallel"] = True
        if residual.startswith(("ladder-fresh", "desync")):
            other.settings["model.ranks"] = settings["model.ranks"] or tensor
        stays = residual == "no-communication" or of_mesh(teacher.get("model.residual", "standard"))
        sizes = itertools.product(
            [tensor] if stays else (1, 2, 3, 4, 8),
            (1, 2, 4, 8),
            (1, 2, 4, 8),
        )
        axes = "mesh.tensor", "mesh.data", "mesh.fsdp"
        other.take(*(dict(zip(axes, size)) for size in sizes))
        names = teacher.get("model.residual"), settings.get("distill.residual")
        if all(splits(name) for name in names if name):
            other.take_each(PARTS)
    other.take_each(PROGRAM)
    return other.settings


def inference(rng: random.Random, settings: dict[str, Any], *, halves: bool) -> dict[str, Any]:
    """How prompts of at most 8 tokens are read."""
    tensor = settings["mesh.tensor"]
    split = 8 % tensor == 0 and reduces(settings["model.residual"])
    return {
        "data": rng.choice([d for d in (1, 2) if d * tensor <= DEVICES]),
        "loop": rng.choice(["scan", "unrolled"]),
        "way": rng.choice(["whole", "chunks"] + ["split"] * split),
        "quantize": "int8" if rng.random() < 0.25 else "none",
        "interleave": 2 if halves and rng.random() < 0.35 else 1,
    }
