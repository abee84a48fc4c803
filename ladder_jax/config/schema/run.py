"""A whole run: the section `run`, and all sections together."""

import dataclasses
import enum

from ladder_jax.config import residual_names
from ladder_jax.config.schema.checks import check
from ladder_jax.config.schema.data import DataConfig
from ladder_jax.config.schema.decode import DecodeConfig
from ladder_jax.config.schema.mesh import MeshConfig, check_fits_mesh
from ladder_jax.config.schema.model import ModelConfig
from ladder_jax.config.schema.retrain import START, ConversionConfig, DistillConfig, LoraConfig
from ladder_jax.config.schema.train import TrainConfig
from ladder_jax.config.schema.typed import fit


class OnDamaged(enum.Enum):
    """What a run does that finds its newest checkpoint damaged."""

    STOP = "stop"
    PREVIOUS = "previous"  # puts it aside, and goes on from the newest whole one


@dataclasses.dataclass(frozen=True)
class FolderConfig:
    """`dir`: the run's folder; empty for `runs/<name>`. `wandb`: a project of Weights & Biases to log to."""

    name: str = "run"
    dir: str | None = None
    on_damaged: OnDamaged = OnDamaged.STOP
    tensorboard: bool = True
    wandb: str | None = None

    def __post_init__(self):
        fit(self, "run")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()
    decode: DecodeConfig = DecodeConfig()
    data: DataConfig = DataConfig()
    run: FolderConfig = FolderConfig()
    distill: DistillConfig = DistillConfig()
    conversion: ConversionConfig = ConversionConfig()
    lora: LoraConfig = LoraConfig()

    def __post_init__(self):
        fit(self, "")
        check_fits_mesh(self.model, self.mesh)
        self._check_retraining()
        rows = self.mesh.data * self.mesh.fsdp
        check(
            self.train.batch % rows == 0,
            f"train.batch={self.train.batch} is not divisible by the mesh's data x fsdp = {rows}",
        )
        check(
            not self.train.sequence_parallel or self.train.sequence % self.mesh.tensor == 0,
            f"train.sequence_parallel splits train.sequence={self.train.sequence} positions over mesh.tensor="
            f"{self.mesh.tensor} ranks, which does not divide them",
        )
        check(
            self.train.batch // rows % self.train.accumulate == 0,
            f"train.accumulate={self.train.accumulate} does not divide a device's {self.train.batch // rows} rows"
            f" (train.batch={self.train.batch} over data x fsdp = {rows})",
        )

    def _check_retraining(self) -> None:
        train, layers = self.train, self.model.num_layers
        check(train.freeze <= layers, f"train.freeze={train.freeze} is more than model.num_layers={layers}")
        check(
            not (self.lora.rank and train.freeze == layers),
            f"train.freeze={train.freeze} leaves no layer for lora.rank={self.lora.rank} to train",
        )
        needs = {
            "train.freeze": train.freeze,
            "lora.rank": self.lora.rank,
            f"distill.teacher={START}": self.distill.teacher == START,
        }
        for name, needed in needs.items():
            check(train.start is not None or not needed, f"{name} needs train.start, the checkpoint to begin with")
        check(
            not (train.z_loss and self.distill.teacher),
            f"train.z_loss={train.z_loss} has no place in a teacher's loss: leave it out with distill.teacher",
        )
        kind = residual_names.parse(self.model.residual).kind
        check(
            not self.conversion.steps or kind in ("ladder", "ladder-fresh"),
            f"conversion.steps needs a model.residual of ladder, ladder-K or ladder-fresh, not {self.model.residual!r}",
        )
        which = self.model.ladder_layers
        check(
            not self.conversion.steps or bool(residual_names.layer_indices(which or "all", layers)),
            f"conversion.steps={self.conversion.steps} has no ladder layer to turn: model.ladder_layers={which!r}",
        )
        for name, value in (
            ("conversion.steps", self.conversion.steps),
            ("distill.hidden_weight", self.distill.hidden_weight),
        ):
            check(
                not (value and train.sequence_parallel),
                f"{name} reads whole streams: not with train.sequence_parallel",
            )
