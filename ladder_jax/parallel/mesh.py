"""Device meshes, how a model's named dimensions are split over them, functions that run on every rank, and arrays that
are copied to their devices piece by piece: one device's shard, or one layer, at a time."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ladder_jax.config import MeshConfig, ModelConfig, check_fits_mesh, parse_residual
from ladder_jax.errors import UserError, wrong_type
from ladder_jax.parallel.collectives import EMULATED

logger = logging.getLogger("ladder_jax")

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")
SHARDED = "NJFGVKEWU"  # the dimensions that tensor parallelism splits
ROUTER = "DC"  # the dimensions of a router, which is gathered and stored in float32, as it chooses in it
Dims = Any  # a pytree prefix of strings such as "BTV"


def make_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes data x fsdp x tensor over the first devices (or the given ones).

    Raises UserError where it is larger than the devices at hand, or cuts across their torus.
    """
    config = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    devices = jax.devices() if devices is None else devices
    if not isinstance(devices, Sequence | np.ndarray) or not all(isinstance(d, jax.Device) for d in devices):
        raise UserError("devices must be jax's devices, such as jax.devices(), or schedule.devices(target)")
    devices = list(devices)
    if config.size > len(devices):
        hint = ""
        if devices and devices[0].platform == "cpu":
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
    emulated: the ranks are computed on one device, by `over_ranks`.
    """

    mesh: Mesh
    batch: tuple[str, ...]
    tensor: tuple[str, ...]
    kv: tuple[str, ...]
    ranks: int
    emulated: bool

    def __repr__(self) -> str:
        sizes = f"data {self.mesh.shape[DATA]} x fsdp {self.fsdp} x tensor {1 if self.emulated else self.ranks}"
        emulated = f", {self.ranks} ranks emulated" if self.emulated else ""
        return f"Layout({sizes} of {self.mesh.devices.flat[0].device_kind}{emulated})"

    def spec(self, dims: str) -> PartitionSpec:
        """The partition of an array with these dimensions, such as "DNH" (letters as in `nn`)."""
        axes = {"B": self.batch, "D": FSDP if self.fsdp > 1 else None}
        if not self.emulated:
            axes |= {**dict.fromkeys(SHARDED, self.tensor), "K": self.kv}
        return PartitionSpec(*(axes.get(dim) for dim in dims))

    def sharding(self, dims: str) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(dims))

    def own_axes(self, dims: str) -> tuple[str, ...]:
        """The axes each of whose ranks computes its own results with an array of these dimensions: all of them.

        With a side network (small letters, see nn/side.py) all tensor ranks compute the same.
        """
        return self.batch if any(map(str.islower, dims)) else self.all_axes

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
    if not isinstance(config, ModelConfig):
        raise wrong_type("config", config, ModelConfig)
    check_mesh(mesh)
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


def check_mesh(mesh: Mesh) -> None:
    """Raises UserError for a mesh with other axes than data, fsdp and tensor."""
    if not isinstance(mesh, Mesh):
        raise wrong_type("mesh", mesh, Mesh)
    if mesh.axis_names != AXES:
        raise UserError(f"the mesh has the axes {mesh.axis_names}; ladder_jax.make_mesh makes one with {AXES}")


def with_ranks(config: ModelConfig, *, tensor: int) -> ModelConfig:
    """`config` with the number of ranks written in, where its function depends on it."""
    if parse_residual(config.residual).depends_on_ranks and config.ranks is None:
        return dataclasses.replace(config, ranks=tensor)
    return config


def on_mesh(fn: Callable, *, layout: Layout, in_dims: Dims, out_dims: Dims) -> Callable:
    """`jax.shard_map` over the whole mesh, fully manual and type-checked, by dimension names.

    `fn` sees one rank's shards. Only an emulation is not type-checked: jax has no varying types for
    the collectives of a `vmap`.
    """
    specs = lambda dims: jax.tree.map(layout.spec, dims)
    return jax.shard_map(
        fn,
        mesh=layout.mesh,
        in_specs=specs(in_dims),
        out_specs=specs(out_dims),
        check_vma=not layout.emulated,
    )


def over_ranks(fn: Callable, *, layout: Layout, in_dims: tuple, out_dims: Dims) -> Callable:
    """`fn` itself on a real tensor axis; where the ranks are emulated, all of them on this device.

    The emulation splits each argument along its tensor-parallel dimension, computes every rank
    under one named axis, over which the collectives work as on a mesh, and joins the results.
    It must stand inside `jax.grad`: only then is a gradient that of the whole function.
    """
    if not layout.emulated:
        return fn

    def emulated(*args):
        pairs = [_align(dims, arg) for dims, arg in zip(in_dims, args, strict=True)]
        split = [jax.tree.map(lambda d, a: _split(a, d, layout.ranks), *pair) for pair in pairs]
        axes = [jax.tree.map(lambda d: 0 if _position(d) is not None else None, dims) for dims, _ in pairs]
        out_axes = jax.tree.map(lambda d: 0 if _position(d) is not None else None, out_dims)
        named = dict(axis_name=EMULATED, axis_size=layout.ranks)  # the size, as no argument may be split
        out = jax.vmap(fn, in_axes=tuple(axes), out_axes=out_axes, **named)(*split)
        dims, out = _align(out_dims, out)
        return jax.tree.map(lambda d, a: _join(a, d), dims, out)

    return emulated


def place(
    part: Callable[[tuple[slice, ...]], np.ndarray], shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> jax.Array:
    """The array of `shape` whose shards `part(index)` returns, one after another, padded with zeros at the end.

    A device may keep using the memory of the returned array, which therefore must not change afterwards.
    """
    shards = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        values = part(index)
        missing = [(0, len(range(*where.indices(n))) - have) for where, n, have in zip(index, shape, values.shape)]
        values = np.pad(values, missing) if any(after for _, after in missing) else values
        shards.append(jax.device_put(values, device).block_until_ready())
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@functools.partial(jax.jit, donate_argnums=0)
def put(stack: Any, layer: Any, index: int) -> Any:
    """`stack` [L, ...], an array or a tree of them, with `layer` written at `index`; the given stack is consumed."""
    return jax.tree.map(lambda s, a: jax.lax.dynamic_update_index_in_dim(s, a, index, 0), stack, layer)


def _align(dims: Dims, tree: Any) -> tuple[Any, Any]:
    """`dims`, a prefix of `tree`, spread to every leaf."""
    spread = jax.tree.map(lambda d, below: jax.tree.map(lambda _: d, below), dims, tree)
    return spread, tree


def _position(dims: str) -> int | None:
    found = [index for index, dim in enumerate(dims) if dim in SHARDED]
    return found[0] if found else None


def _split(array: jax.Array, dims: str, ranks: int) -> jax.Array:
    position = _position(dims)
    if position is None:
        return array
    if dims[position] == "K" and array.shape[position] < ranks:  # several ranks share a head
        array = jnp.repeat(array, ranks // array.shape[position], axis=position)
    shape = array.shape
    array = array.reshape(*shape[:position], ranks, shape[position] // ranks, *shape[position + 1 :])
    return jnp.moveaxis(array, position, 0)


def _join(array: jax.Array, dims: str) -> jax.Array:
    position = _position(dims)
    if position is None:
        return array
    array = jnp.moveaxis(array, 0, position)
    return array.reshape(*array.shape[:position], -1, *array.shape[position + 2 :])
