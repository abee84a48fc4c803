"""Draws one legitimate configuration: settings as on the command line, a batch's form, and what is
compared.

Case (SEED, INDEX) is a function of these two numbers. What a draw depends on is drawn before it, so
that few cases are refused; a rule that is not known here is met all the same.
"""

import dataclasses
import json
import math
from typing import Any

import numpy as np

DEVICES = 8
DENSE = (
    "standard ladder ladder-2 ladder-3 ladder-fresh parallel parallel-shared-norm parallel-ladder desync-2 desync-3"
    " no-communication"
).split()
EXPERTS = "standard ladder ladder-2 farskip farskip farskip parallel parallel-shared-norm parallel-ladder".split()
CHECKS = {"inference": 0.3, "another mesh": 0.25, "resumed": 0.12, "evaluated": 0.15}
"""And of how many cases each is."""


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


class Dice:
    def __init__(self, seed: int, index: int):
        self.rng = np.random.default_rng((seed, index))

    def one(self, options):
        return options[int(self.rng.integers(len(options)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)


def draw(seed: int, index: int) -> Case:
    dice = Dice(seed, index)
    of_experts = dice.chance(0.3)
    settings = model(dice, of_experts)
    moe = experts(dice, settings) if of_experts else {}
    settings |= moe
    settings |= mesh(dice, settings)
    settings |= shape(dice, settings)
    settings |= training(dice, settings)
    retrained, teacher = retraining(dice, settings)
    settings |= retrained
    capacity = settings.get("model.moe.capacity")
    drops = (
        capacity is not None
        and capacity < settings["model.moe.experts"] / settings["model.moe.top_k"]
    )
    checks = tuple(check for check, share in CHECKS.items() if dice.chance(share))
    case = Case(
        seed,
        index,
        preset="tiny-moe" if of_experts else "tiny",
        settings=settings,
        other=another(dice, settings, teacher, drops),
        teacher=teacher,
        batch=dice.one(["plain", "plain", "packed", "masked"]),
        checks=checks,
        drops=drops,
        step=int(dice.rng.integers(0, 5)) if "conversion.steps" in settings else 0,
        inference=inference(dice, settings),
    )
    # drawn last: a seed's cases are otherwise those from before there were halves
    return in_halves(dice, case)


def model(dice: Dice, of_experts: bool) -> dict[str, Any]:
    residual, layers = dice.one(EXPERTS if of_experts else DENSE), dice.one([2, 2, 2, 3, 3, 4, 5])
    low = dice.chance(0.12)
    drawn = {
        "model.residual": residual,
        "model.num_layers": layers,
        "model.d_model": dice.one([16, 16, 24, 32]),
        "model.vocab_size": dice.one([37, 48, 61]),
        "model.biases": dice.one(["none", "none", "qkv", "attention"] + ["all"] * (not of_experts)),
        "model.qk_norm": dice.one([False, False, True, "all-heads"]),
        "model.tie_embeddings": dice.chance(0.3),
        "model.rope_theta": dice.one([10_000.0, 100.0]),
        "model.dtype": "bfloat16" if low else "float32",
        "model.residual_dtype": "bfloat16" if low else "float32",
    }
    if dice.chance(0.2):
        drawn["model.rope_scaling"] = "{factor: 8.0, original_context: 16}"
    if residual.startswith(("ladder", "parallel-ladder", "farskip")) and dice.chance(0.5):
        drawn["model.ladder_layers"] = some_layers(dice, layers)
    return drawn


def some_layers(dice: Dice, layers: int) -> int | str:
    """The last ones, or a list."""
    if dice.chance(0.4):
        return int(dice.rng.integers(0, layers + 1))
    chosen = [layer for layer in range(layers) if dice.chance(0.5)]
    return str(chosen or [int(dice.rng.integers(layers))])


def experts(dice: Dice, settings: dict[str, Any]) -> dict[str, Any]:
    count = dice.one([1, 2, 3, 3, 4, 4, 5, 6])
    top_k = int(dice.rng.integers(1, min(count, 4) + 1))
    drawn = {"model.moe.experts": count, "model.moe.top_k": top_k}
    drawn["model.moe.expert_width"] = dice.one([8, 16])
    drawn["model.moe.softmax"] = dice.one(["chosen", "all"])
    drawn["model.moe.router_bias"] = dice.chance(0.3)
    drawn["model.moe.shared_width"] = dice.one([0, 24, 48])
    drawn["model.moe.shared_gate"] = bool(drawn["model.moe.shared_width"]) and dice.chance(0.5)
    drawn["model.moe.dense_layers"] = 1 if dice.chance(0.25) else 0
    exchangeable = settings["model.residual"].split("-")[0] in ("standard", "ladder", "farskip")
    if exchangeable and not drawn["model.moe.dense_layers"] and dice.chance(0.5):
        drawn["mesh.experts"] = "exchange"
    if "mesh.experts" in drawn or dice.chance(0.3):
        drawn["model.moe.capacity"] = 0.8 if dice.chance(0.25) else count / top_k
    return drawn


def mesh(dice: Dice, settings: dict[str, Any]) -> dict[str, Any]:
    """Devices an axis, and on one tensor rank perhaps emulated ranks."""
    tensor, ranks = dice.one([1, 1, 1, 2, 2, 2, 4, 4, 8, 3]), {}
    if settings["model.residual"].startswith(("ladder-fresh", "desync")):
        if tensor == 1:
            ranks = {"model.ranks": dice.one([1, 2, 3, 4])}
        elif dice.chance(0.5):
            ranks = {"model.ranks": tensor}
    emulated = ranks.get("model.ranks", tensor) != tensor
    return {
        "mesh.tensor": tensor,
        **rows(dice, tensor, settings["model.d_model"], emulated),
        **ranks,
    }


def rows(dice: Dice, tensor: int, d_model: int, emulated: bool) -> dict[str, int]:
    """data and fsdp, which emulated ranks exclude."""
    sizes = [n for n in (1, 2, 4, 8) if d_model % n == 0 and not (emulated and n > 1)]
    pairs = [(d, f) for d in (1, 2, 4, 8) for f in sizes if d * f * tensor <= DEVICES]
    data, fsdp = dice.one(pairs)
    return {"mesh.data": data, "mesh.fsdp": fsdp}


def shape(dice: Dice, settings: dict[str, Any]) -> dict[str, Any]:
    """What the ranks must divide."""
    ranks = max(settings["mesh.tensor"], settings.get("model.ranks", 1))
    heads = dice.one([n for n in (1, 2, 3, 4, 6, 8) if n % ranks == 0])
    fits = lambda kv: heads % kv == 0 and (kv % ranks == 0 or ranks % kv == 0)
    drawn = {
        "model.num_heads": heads,
        "model.num_kv_heads": dice.one([kv for kv in range(1, heads + 1) if fits(kv)]),
    }
    drawn["model.head_dim"] = dice.one([4, 6, 8] if heads < 8 else [2, 4])
    # a norm over two elements that are both small magnifies what is rounded
    if settings["model.qk_norm"] is True:
        drawn["model.head_dim"] = max(drawn["model.head_dim"], 4)
    drawn["model.d_ff"] = dice.one([24, 48] if ranks in (3, 8) else [20, 24, 32])
    return drawn


def training(dice: Dice, settings: dict[str, Any]) -> dict[str, Any]:
    exchange = settings.get("mesh.experts") == "exchange"
    split = exchange or (dice.chance(0.4) and reduces(settings["model.residual"]))
    every = settings["mesh.tensor"] if split else 1
    drawn = {"train.sequence": dice.one([t for t in range(6, 11) if t % every == 0])}
    drawn |= form(dice, settings, split)
    drawn |= parts(dice, settings)
    drawn["train.loss_chunk"] = dice.one([3, 5, 2048])
    if dice.chance(0.3):
        drawn["train.z_loss"] = 0.01
    if "model.moe.experts" in settings:
        drawn["train.load_balance"] = dice.one([0.0, 0.3])
        drawn["train.router_z_loss"] = dice.one([0.0, 0.02])
    # The first moment is then half a gradient, exactly, and nothing is clipped.
    drawn |= {
        "train.beta1": 0.5,
        "train.clip_norm": 1e30,
        "train.steps": 2,
        "train.warmup_steps": 0,
    }
    return drawn


def reduces(residual: str) -> bool:
    """Whether each sublayer's output is reduced, which sequence parallelism needs."""
    return not residual.startswith(("desync", "no-communication"))


def form(dice: Dice, settings: dict[str, Any], split: bool) -> dict[str, Any]:
    """How the program is built."""
    drawn = {"train.loop": dice.one(["scan", "scan", "unrolled"])}
    drawn["train.remat"] = dice.one(["none", "none", "full", "save-matmuls", "offload"])
    drawn["train.sequence_parallel"] = split
    rings = (
        split
        and not settings["model.residual"].startswith("parallel")
        and "model.moe.experts" not in settings
    )
    drawn["train.collective_matmul"] = "ring" if rings and dice.chance(0.5) else "none"
    return drawn


def parts(dice: Dice, settings: dict[str, Any], batch: int | None = None) -> dict[str, int]:
    """The batch, unless it is given, and in how many parts a device computes its rows."""
    shards = settings["mesh.data"] * settings["mesh.fsdp"]
    batch = batch or dice.one([n for n in (4, 6, 8) if n % shards == 0])
    each = batch // shards
    return {
        "train.batch": batch,
        "train.accumulate": dice.one([n for n in (1, 1, 2, 3, 4) if each % n == 0]),
    }


def retraining(dice: Dice, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Frozen layers, low-rank factors and a teacher, and the teacher's own settings."""
    layers, dense = settings["model.num_layers"], settings.get("model.moe.dense_layers", 0)
    if not dice.chance(0.3):
        return {}, {}
    drawn, teacher = {"train.start": "START"}, {}
    drawn |= conversion(dice, settings)
    if not dense and dice.chance(0.5):
        drawn["train.freeze"] = int(dice.rng.integers(1, layers + 1))
    if not dense and drawn.get("train.freeze") != layers and dice.chance(0.45):
        drawn["lora.rank"] = dice.one([2, 3])
        drawn["lora.alpha"] = 4.0
        drawn["lora.targets"] = dice.one(["all", "all", "query,value", "gate,down", "out"])
    if dice.chance(0.45):
        drawn["distill.teacher"] = dice.one(["start", "TEACHER"])
        drawn["distill.temperature"] = dice.one([1.0, 2.0])
        drawn["distill.alpha"] = dice.one([1.0, 0.7])
        drawn["train.z_loss"] = 0.0
        teachers = EXPERTS if "model.moe.experts" in settings else DENSE
        shared = "parallel-shared-norm"
        alike = [n for n in teachers if (n == shared) == (settings["model.residual"] == shared)]
        alike = [n for n in alike if reduces(n) or not settings["train.sequence_parallel"]]
        if drawn["distill.teacher"] == "start" or dice.chance(0.3):
            drawn["distill.residual"] = dice.one(
                [n for n in alike if n != settings["model.residual"]] or alike
            )
        else:
            teacher = {
                "model.residual": dice.one(alike),
                "model.ladder_layers": None,
                "model.ranks": None,
            }
        whole = (
            not dense
            and not settings["train.sequence_parallel"]
            and "conversion.steps" not in drawn
        )
        if (
            whole
            and not settings["model.residual"].startswith(("desync", "no-"))
            and dice.chance(0.3)
        ):
            drawn["distill.hidden_weight"] = 0.5
            drawn["distill.hidden_every"] = dice.one([1, 2])
    return drawn, teacher


def conversion(dice: Dice, settings: dict[str, Any]) -> dict[str, Any]:
    """Layers on their way from standard."""
    count, which = settings["model.num_layers"], settings.get("model.ladder_layers", "all")
    ladder = {"all": count}.get(which) or (
        which if isinstance(which, int) else which.count(",") + 1
    )
    fits = settings["model.residual"].startswith(("ladder", "farskip")) and not settings.get(
        "model.moe.dense_layers"
    )
    if not fits or not ladder or settings["train.sequence_parallel"] or not dice.chance(0.5):
        return {}
    groups = int(dice.rng.integers(1, min(ladder, 2) + 1))
    return {
        "conversion.steps": 4,
        "conversion.groups": groups,
        "conversion.pace": dice.one(["ramp", "jump"]),
    }


def another(
    dice: Dice, settings: dict[str, Any], teacher: dict[str, Any], drops: bool
) -> dict[str, Any]:
    """Another mesh and form of the same function of the same batch; where rows drop, another form
    only.
    """
    residual = settings["model.residual"]
    split = dice.chance(0.4) and reduces(residual)
    if drops:
        changed = form(dice, settings, settings["train.sequence_parallel"])
        return settings | changed
    heads, kv, sequence = (
        settings[n] for n in ("model.num_heads", "model.num_kv_heads", "train.sequence")
    )
    widths = math.gcd(settings["model.d_ff"], settings.get("model.moe.shared_width", 0))
    of_ranks = residual.startswith(("ladder-fresh", "desync"))
    ranks = settings.get("model.ranks", settings["mesh.tensor"])
    fits = lambda t: heads % t == 0 and (kv % t == 0 or t % kv == 0) and widths % t == 0
    tensors = [t for t in (1, 2, 3, 4, 8) if fits(t)]
    if of_ranks:
        tensors = [t for t in {1, ranks} if t <= DEVICES]
    if residual == "no-communication":
        tensors = [settings["mesh.tensor"]]
    exchange = settings.get("mesh.experts") == "exchange"
    if exchange:
        tensors, split = [t for t in tensors if sequence % t == 0], True
    tensor = dice.one(tensors)
    changed = {"mesh.tensor": tensor}
    while True:
        changed |= rows(dice, tensor, settings["model.d_model"], of_ranks and ranks != tensor)
        if settings["train.batch"] % (changed["mesh.data"] * changed["mesh.fsdp"]) == 0:
            break
    if of_ranks:
        changed["model.ranks"] = ranks
    split = split and sequence % tensor == 0
    taught = settings.get("distill.residual", "ladder"), teacher.get("model.residual", "ladder")
    whole = (
        "distill.hidden_weight" in settings
        or "conversion.steps" in settings
        or not all(map(reduces, taught))
    )
    changed |= form(dice, settings, split and not whole)
    changed |= parts(dice, {**settings, **changed}, settings["train.batch"])
    return settings | changed


def in_halves(dice: Dice, case: Case) -> Case:
    """Either program perhaps in two halves in turn; prompts likewise."""
    drawn = case.settings
    names = (
        drawn["model.residual"],
        case.teacher.get("model.residual"),
        drawn.get("distill.residual"),
    )
    fits = all(reduces(name) and not name.startswith("farskip") for name in names if name)
    fits = fits and not case.drops
    programs = []
    for settings in (drawn, case.other):
        shards = settings["mesh.data"] * settings["mesh.fsdp"] * settings["train.accumulate"]
        odd = settings["train.batch"] // shards % 2 == 1
        waits = settings["train.collective_matmul"] != "none" or "conversion.steps" in settings
        takes = (
            fits
            and not waits
            and not (odd and settings["train.sequence_parallel"])
            and dice.chance(0.35)
        )
        programs.append({**settings, "train.interleave": 2} if takes else settings)
    prompts = case.inference | (
        {"interleave": 2} if fits and dice.chance(0.35) else {"interleave": 1}
    )
    return dataclasses.replace(case, settings=programs[0], other=programs[1], inference=prompts)


def inference(dice: Dice, settings: dict[str, Any]) -> dict[str, Any]:
    """How prompts of at most 8 tokens are read."""
    tensor = settings["mesh.tensor"]
    way = dice.one(
        ["whole", "chunks"] + ["split"] * (8 % tensor == 0 and reduces(settings["model.residual"]))
    )
    data = dice.one([d for d in (1, 2) if d * tensor <= DEVICES])
    quantize = "int8" if dice.chance(0.25) else "none"
    return {"data": data, "loop": dice.one(["scan", "unrolled"]), "way": way, "quantize": quantize}
