"""The section `mesh`, and whether a model can be split over it."""

import dataclasses

from ladder_jax.config.schema.checks import check, check_positive
from ladder_jax.config.schema.model import ModelConfig
from ladder_jax.config.schema.typed import fit


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices an axis: data x fsdp x tensor."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        fit(self, "mesh")
        check_positive(self, "mesh", "data", "fsdp", "tensor")

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.tensor


def check_fits_mesh(model: ModelConfig, mesh: MeshConfig) -> None:
    """Refuse a mesh over which the model's dimensions cannot be split."""
    ranks = mesh.tensor if model.ranks is None or mesh.tensor > 1 else model.ranks
    check(model.d_model % mesh.fsdp == 0, f"model.d_model={model.d_model} is not divisible by mesh.fsdp={mesh.fsdp}")
    for name in ("num_heads", "d_ff"):
        value = getattr(model, name)
        check(value % ranks == 0, f"model.{name}={value} is not divisible by mesh.tensor={ranks}")
    kv = model.num_kv_heads
    check(
        kv % ranks == 0 or ranks % kv == 0,
        f"model.num_kv_heads={kv} and mesh.tensor={ranks}: one must divide the other",
    )
    check(
        model.ranks is None or mesh.tensor in (1, model.ranks),
        f"this {model.residual} model is a function of model.ranks={model.ranks} ranks;"
        f" mesh.tensor={mesh.tensor} computes another one (allowed: 1, {model.ranks})",
    )
