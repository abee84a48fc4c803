"""Which runs the study consists of: the six topologies, their depths, their norms; and how long each is."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from experiments.pretrain import predicted
from ladder_jax.config import RunConfig, load, preset
from ladder_jax.errors import UserError, unknown
from ladder_jax.predict import machine

HERE = pathlib.Path(__file__).parent
TOPOLOGIES = ("standard", "parallel", "ladder", "ladder-2", "ladder-fresh", "parallel-ladder")
RANKS = 8
MACHINES = ("h100-nvlink", "h100-no-nvlink", "v5p")
SHAPE, MACHINE, ROWS, SEQUENCE = "ladder-1b", MACHINES[0], 4, 2048  # of the predicted time
WATCHED = ("standard", "ladder", "ladder-2")  # whose gradients are measured, layer by layer


@dataclasses.dataclass(frozen=True)
class Run:
    """group: main, depth or norm. residual, layers, norm: what sets the run apart; config: all of it, resolved."""

    group: str
    residual: str
    layers: int
    norm: str
    seed: int
    config: RunConfig

    @property
    def name(self) -> str:
        return f"{self.residual}, {self.layers} layers, {self.norm}, seed {self.seed}"

    @property
    def watched(self) -> bool:
        return self.group == "main" and self.residual in WATCHED


def runs(
    *,
    folder: pathlib.Path,
    overrides: list[str],
    seeds: int,
    ablation_seeds: int,
    topologies: Sequence[str] = TOPOLOGIES,
) -> list[Run]:
    """In the order in which they are made: what is killed half-way has compared all topologies on fewer seeds.

    topologies: of the main comparison, which always has Standard. Raises UserError for others than TOPOLOGIES.
    """
    if seeds < 1 or ablation_seeds < 0:
        raise UserError(
            f"--seeds must be positive, and --ablation-seeds not negative: not {seeds} and {ablation_seeds}"
        )
    for residual in topologies:
        if residual not in TOPOLOGIES:
            raise unknown("topology of the study", residual, TOPOLOGIES)
    compared = [residual for residual in TOPOLOGIES if residual in ("standard", *topologies)]
    base = load(str(HERE / "study.yaml"), overrides=overrides)
    layers = base.model.num_layers

    def run(group: str, residual: str, seed: int, *, layers: int = layers, norm: str = "pre") -> Run:
        changed = [f"model.residual={residual}", f"model.num_layers={layers}", f"train.seed={seed}"]
        changed += [f"model.ranks={RANKS}"] if residual == "ladder-fresh" else []
        changed += ["model.qk_norm=true"] if norm == "query-key" else []
        if group == "main":
            changed.append(f"train.steps={steps(residual, of_standard=base.train.steps, every=every(base))}")
            if residual in WATCHED:
                changed.append(f"train.keep_every={base.train.checkpoint_every}")
        place = folder / group / f"{residual}-of-{layers}-{norm}" / f"seed-{seed}"
        changed.append(f"run.dir={place}")
        return Run(
            group, residual, layers, norm, seed, load(str(HERE / "study.yaml"), overrides=[*overrides, *changed])
        )

    found = [run("main", residual, seed) for seed in range(seeds) for residual in compared]
    for seed in range(ablation_seeds):
        for other in (layers // 2, 2 * layers):
            found += [run("depth", residual, seed, layers=other) for residual in ("standard", "ladder")]
        found += [run("norm", residual, seed, norm="query-key") for residual in ("standard", "ladder")]
        found.append(run("norm", "parallel-shared-norm", seed, norm="shared"))
    return found


def every(base: RunConfig) -> int:
    """Steps between two measurements of the held-out loss."""
    return base.train.evaluate_every or base.train.steps


def steps(residual: str, *, of_standard: int, every: int) -> int:
    """As many as fit into Standard's predicted time, up to the next measurement of the held-out loss."""
    speedup = seconds("standard") / seconds(residual)
    return max(of_standard, math.ceil(of_standard * speedup / every) * every)


def seconds(residual: str, *, shape: str = SHAPE, name: str = MACHINE) -> float:
    return step(residual, shape=shape, name=name).seconds


def step(residual: str, *, shape: str = SHAPE, name: str = MACHINE) -> predicted.Predicted:
    """The predicted step of one microbatch of `shape` over RANKS devices of the machine called `name`."""
    changes = {"ranks": RANKS} if residual == "ladder-fresh" else {}
    if preset(shape).num_heads % RANKS:  # the paper's speed runs of 3B have 32 heads
        changes |= {"num_heads": 32, "num_kv_heads": 32}
    config = preset(shape, residual=residual, **changes)
    return predicted.step(config, machine=machine.load(name), tensor=RANKS, rows=ROWS, sequence=SEQUENCE)
