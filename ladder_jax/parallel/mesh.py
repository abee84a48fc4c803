"""Device meshes, and how a model's named dimensions lie over them."""

import dataclasses
import logging
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ladder_jax.config import MeshConfig, ModelConfig, check_fits_mesh, parse_residual
from ladder_jax.errors import UserError
from ladder_jax.parallel.collectives import EMULATED

logger = logging.getLogger("ladder_jax")

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")


def make_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes data x fsdp x tensor over the first devices (or the given ones).

    Raises UserError where it is larger than the devices at hand, or cuts across their torus.
    """
    config = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    devices = jax.devices() if devices is None else list(devices)
    if config.size > len(devices):
        hint = ""
        if devices[0].platform == "cpu":
            hint = f"; JAX_NUM_CPU_DEVICES={config.size} or --cpu-devices {config.size} simulates them"
        raise UserError(
            f"mesh {data} x {fsdp} x {tensor} (data x fsdp x tensor) needs {config.size} devices,"
            f" but this machine has {len(devices)}{hint}"
        )
    sizes, types, devices = (data, fsdp, tensor), (AxisType.Auto,) * 3, devices[: config.size]
    try:
        # It may reorder devices to match the interconnect: what a real mesh needs.
        return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
    except NotImplementedError:  # a TPU's torus has no such axes
        logger.warning(
            "mesh %d x %d x %d cuts across the axes of the devices' torus, so collectives share links:"
            " `ladder-jax plan` lists those that do not", *sizes
        )  # fmt: skip
        placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return Mesh(placed, AXES, axis_types=types)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which mesh axes each named dimension of a model is split over.

    mesh: the axes data, fsdp, tensor; with fewer key/value heads than tensor ranks the last one
        is split in two, (kv, group), over the same devices in the same order.
    batch, tensor, kv: the mesh axes of the batch, of the tensor-parallel dimensions, and of the
        key/value heads (the ranks of one `group` hold the same head).
    ranks: how many tensor-parallel ranks compute the model.
    emulated: the ranks are computed on one device, by `emulate.over_ranks`.
    """

    mesh: Mesh
    batch: tuple[str, ...]
    tensor: tuple[str, ...]
    kv: tuple[str, ...]
    ranks: int
    emulated: bool

    def spec(self, dims: str) -> PartitionSpec:
        """The partition of an array with these dimensions, such as "DNH" (letters as in `nn`)."""
        axes = {"B": self.batch, "D": FSDP if self.fsdp > 1 else None}
        if not self.emulated:
            axes |= {**dict.fromkeys("NJFGV", self.tensor), "K": self.kv}
        return PartitionSpec(*(axes.get(dim) for dim in dims))

    def sharding(self, dims: str) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(dims))

    @property
    def all_axes(self) -> tuple[str, ...]:
        return self.batch + self.tensor

    @property
    def fsdp(self) -> int:
        """Over how many ranks every parameter is split along D, beside tensor parallelism."""
        return self.mesh.shape[FSDP]

    @property
    def batch_ranks(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.batch)


def layout(config: ModelConfig, *, mesh: Mesh) -> Layout:
    """How `config`'s model lies over `mesh` (axes data, fsdp, tensor). Raises UserError where it cannot."""
    if mesh.axis_names != AXES:
        raise UserError(f"the mesh has the axes {mesh.axis_names}; ladder_jax.make_mesh makes one with {AXES}")
    tensor = mesh.shape["tensor"]
    check_fits_mesh(config, MeshConfig(**mesh.shape))
    batch = ("data", "fsdp")
    if tensor == 1 and (config.ranks or 1) > 1:
        return Layout(mesh, batch, (EMULATED,), (EMULATED,), config.ranks, emulated=True)
    if tensor <= config.num_kv_heads:
        return Layout(mesh, batch, ("tensor",), ("tensor",), tensor, emulated=False)
    data, fsdp, kv = mesh.shape["data"], mesh.shape["fsdp"], config.num_kv_heads
    split = Mesh(
        np.asarray(mesh.devices).reshape(data, fsdp, kv, tensor // kv),
        ("data", "fsdp", "kv", "group"),
        axis_types=(AxisType.Auto,) * 4,
    )
    return Layout(split, batch, ("kv", "group"), ("kv",), tensor, emulated=False)


def with_ranks(config: ModelConfig, *, tensor: int) -> ModelConfig:
    """`config` with the number of ranks written in, where its function depends on it."""
    if parse_residual(config.residual).depends_on_ranks and config.ranks is None:
        return dataclasses.replace(config, ranks=tensor)
    return config
