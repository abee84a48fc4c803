"""Device meshes, how a model's named dimensions are split over them, and arrays that are copied to
their devices piece by piece: one device's shard, or one layer, at a time.

Programs run on a mesh of our own, whose axes are Auto. A caller's mesh may have other names and
Explicit axes, and be set by `jax.set_mesh` (see compiled.py); on meshes of `make_mesh` alone there
is nothing to change.
"""

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ladder_jax.config import MeshConfig, ModelConfig, check_fits_mesh, parse_residual
from ladder_jax.config.fields import check_type
from ladder_jax.errors import UserError, unknown
from ladder_jax.parallel.collectives import EMULATED, Axes
from ladder_jax.scopes import AXES, DATA, FSDP, TENSOR

logger = logging.getLogger("ladder_jax")

SHARDED = "NFVKEW"  # the dimensions that tensor parallelism splits


def make_mesh(
    *, data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with the axes data x fsdp x tensor over the first devices (or the given ones).

    Raises UserError where it is larger than the devices at hand. One that cuts across their torus
    is made, with a warning.
    """
    config = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    devices = jax.devices() if devices is None else devices
    if not isinstance(devices, Sequence | np.ndarray) or not all(
        isinstance(d, jax.Device) for d in devices
    ):
        raise UserError(
            "devices must be jax's devices, such as jax.devices(), or schedule.devices(target)"
        )
    devices = list(devices)
    if config.size > len(devices):
        hint = ""
        if devices and devices[0].platform == "cpu":
            hint = (
                f"; JAX_NUM_CPU_DEVICES={config.size} or --cpu-devices {config.size} simulates them"
            )
        raise UserError(
            f"mesh {data} x {fsdp} x {tensor} (data x fsdp x tensor) needs {config.size} devices,"
            f" but this machine has {len(devices)}{hint}"
        )
    sizes = (data, fsdp, tensor)
    types = (AxisType.Auto,) * 3
    devices = devices[: config.size]
    try:
        # It may reorder devices to match the interconnect: what a real mesh needs.
        return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
    except NotImplementedError:  # a TPU's torus has no such axes
        logger.warning(
            "mesh %d x %d x %d cuts across the axes of the devices' torus, so collectives share links:"
            " `ladder-jax plan` lists those that do not",
            *sizes,
        )
        placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return Mesh(placed, AXES, axis_types=types)


@dataclasses.dataclass(frozen=True)
class NamedMesh:
    """A mesh and what it calls our axes. Stands wherever a mesh of `make_mesh` does; made by
    `mesh_of`.

    names: of the mesh's axes, those that are data, fsdp and tensor; None for an axis that it lacks,
        of one rank.
    """

    mesh: Mesh
    names: tuple[str | None, str | None, str | None]

    @property
    def shape(self) -> dict[str, int]:
        """Sizes by our names."""
        return {axis: self.mesh.shape[name] if name else 1 for axis, name in zip(AXES, self.names)}

    @property
    def devices(self) -> np.ndarray:
        return self.own.devices

    @property
    def size(self) -> int:
        return self.mesh.size

    @property
    def is_own(self) -> bool:
        """Whether it is as `make_mesh` makes them."""
        return self.own is self.mesh

    @functools.cached_property
    def own(self) -> Mesh:
        """The same devices in the same order, with the axes data, fsdp and tensor, all Auto.

        Its axes have the mesh's order, as programs may hold arrays of both; an axis that it lacks
        follows the one that ours has before it.
        """
        if self.mesh.axis_names == AXES and set(self.mesh.axis_types) == {AxisType.Auto}:
            return self.mesh
        places = {}
        place = -1
        for axis, name in zip(AXES, self.names):
            place = self.mesh.axis_names.index(name) if name else place
            places[axis] = place
        order = sorted(AXES, key=places.get)
        devices = np.asarray(self.mesh.devices).reshape([self.shape[axis] for axis in order])
        return Mesh(devices, tuple(order), axis_types=(AxisType.Auto,) * 3)


def mesh_of(mesh: Mesh | NamedMesh, *, axes: Mapping[str, str] | None = None) -> NamedMesh:
    """A mesh of jax's for a model of ours: `mesh_of(mesh, axes={"data": "dp", "tensor": "tp"})`.

    axes: what the mesh calls data, fsdp and tensor. An axis left out is the one of that name; one
        that the mesh lacks has one rank, and axes of one device need no name. Explicit axes stay
        so: parameters and results have types on this mesh. A mesh whose axes have our names is
        taken as it is, without this.

    Raises UserError for names that are none, and for axes of several devices without a name.
    """
    if isinstance(mesh, NamedMesh) and axes is None:
        return mesh
    check_type("mesh", mesh, Mesh)
    given = {} if axes is None else axes
    check_type("axes", given, Mapping)
    for axis, name in given.items():
        if axis not in AXES:
            raise unknown("axis", axis, AXES)
        if name not in mesh.axis_names:
            raise unknown("axis of the mesh", name, mesh.axis_names)
    names = {axis: axis for axis in AXES if axis in mesh.axis_names} | dict(given)
    if len(set(names.values())) < len(names):
        raise UserError(f"axes must name an axis of the mesh once, not {names}")
    named = names.values()
    left = [name for name in mesh.axis_names if mesh.shape[name] > 1 and name not in named]
    if left:
        order = AXES if len(left) > 2 else (DATA, TENSOR)[-len(left) :]
        example = given | dict(zip(order, left))
        raise UserError(
            f"the mesh has the axes {mesh.axis_names}, and a model's are {AXES}:"
            f" name them by ladder_jax.mesh_of(mesh, axes={example})"
        )
    return NamedMesh(mesh, tuple(names.get(axis) for axis in AXES))


def context_mesh() -> Mesh | None:
    """The mesh that `jax.set_mesh` set, if one did. Raises UserError in a trace, which does not
    know its devices.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return None
    try:
        return jax.sharding.get_mesh()
    except ValueError:
        raise UserError(
            "a model that is made inside jax.jit and the like needs its mesh="
        ) from None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which mesh axes each named dimension of a model is split over.

    given: the caller's mesh. Parameters, batches and results lie on it.
    mesh: the one that programs run on, all Auto: the axes data, fsdp, tensor; with fewer key/value
        heads than tensor ranks the last one is split in two, (kv, group), over the same devices in
        the same order.
    batch, tensor, kv: the mesh axes of the batch, of the tensor-parallel dimensions, and of the
        key/value heads (the ranks of one `group` hold the same head).
    ranks: how many tensor-parallel ranks compute the model.
    """

    given: NamedMesh
    mesh: Mesh
    tensor: Axes
    kv: Axes
    ranks: int
    batch: ClassVar[Axes] = (DATA, FSDP)

    @property
    def emulated(self) -> bool:
        """Whether the ranks are computed on one device, by `over_ranks`."""
        return EMULATED in self.tensor

    def spec(self, dims: str) -> PartitionSpec:
        """The partition over `mesh` of an array with these dimensions, such as "DNH" (letters as in
        `nn`).
        """
        axes = {"B": self.batch}
        if self.fsdp > 1:
            axes["D"] = FSDP
        if not self.emulated:
            axes |= dict.fromkeys(SHARDED, self.tensor)
            axes["K"] = self.kv
        return PartitionSpec(*map(axes.get, dims))

    def sharding(self, dims: str) -> NamedSharding:
        """Of an array with these dimensions on the caller's mesh."""
        if self.given.is_own:
            return NamedSharding(self.mesh, self.spec(dims))
        mesh = self.given.mesh
        return NamedSharding(mesh, self._renamed(dims, self._names(mesh)))

    def sharding_on(
        self, mesh: AbstractMesh, shape: tuple[int, ...], *, dims: str, axes: Axes
    ) -> NamedSharding:
        """Of an array on any mesh over the same devices: split along those of its `axes` that
        correspond to ours, where they divide `shape`.
        """
        names = {axis: name for axis, name in self._names(mesh).items() if name in axes}
        parts = zip(self._renamed(dims, names), shape)
        divided = [
            part if part and size % _ranks(mesh, part) == 0 else None for part, size in parts
        ]
        return NamedSharding(mesh, PartitionSpec(*divided))

    def own_axes(self, dims: str) -> Axes:
        """The axes each of whose ranks computes its own results with an array of these dimensions.

        All of them, but with small letters those of the batch: all tensor ranks compute the same.
        """
        return self.batch if any(map(str.islower, dims)) else self.all_axes

    @property
    def all_axes(self) -> Axes:
        return self.batch + self.tensor

    @property
    def fsdp(self) -> int:
        """Over how many ranks every parameter is split along D, beside tensor parallelism."""
        return self.mesh.shape[FSDP]

    @property
    def batch_ranks(self) -> int:
        return _ranks(self.mesh, self.batch)

    def _names(self, mesh):
        """What `mesh` calls those of our axes that have several ranks: as the caller's mesh does,
        or as we do.

        Where ranks share heads, tensor's name is that of `group`: no axis of the caller's is `kv`.
        """
        sizes = self.given.shape
        ours = (*self.batch, self.tensor[-1])
        names = {}
        for axis, own, given in zip(AXES, ours, self.given.names):
            for name in (axis, given):
                if 1 < sizes[axis] == mesh.shape.get(name):
                    names[own] = name
        return names

    def _renamed(self, dims, names):
        """The partition over axes called `names`, by ours."""

        def renamed(part):
            axes = (part,) if isinstance(part, str) else part or ()
            return tuple(names[axis] for axis in axes if axis in names) or None

        return PartitionSpec(*map(renamed, self.spec(dims)))


def layout(config: ModelConfig, *, mesh: Mesh | NamedMesh) -> Layout:
    """How `config`'s model lies over `mesh` (axes data, fsdp, tensor). Raises UserError where it
    cannot.
    """
    check_type("config", config, ModelConfig)
    given = mesh_of(mesh)
    ranks = given.shape[TENSOR]
    check_fits_mesh(config, MeshConfig(**given.shape))
    if ranks == 1 and (config.ranks or 1) > 1:
        return Layout(given, given.own, tensor=(EMULATED,), kv=(EMULATED,), ranks=config.ranks)
    if ranks <= config.num_kv_heads:
        return Layout(given, given.own, tensor=(TENSOR,), kv=(TENSOR,), ranks=ranks)
    grouped = _with_groups(given.own, kv=config.num_kv_heads)
    return Layout(given, grouped, tensor=("kv", "group"), kv=("kv",), ranks=ranks)


def _with_groups(mesh, *, kv):
    """`mesh` with its tensor axis split in two, (kv, group)."""
    at = mesh.axis_names.index(TENSOR)
    sizes = *mesh.axis_sizes[:at], kv, mesh.shape[TENSOR] // kv, *mesh.axis_sizes[at + 1 :]
    names = *mesh.axis_names[:at], "kv", "group", *mesh.axis_names[at + 1 :]
    return Mesh(
        np.asarray(mesh.devices).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names)
    )


def with_ranks(config: ModelConfig, *, tensor: int) -> ModelConfig:
    """`config` with the number of ranks written in, where its function depends on it."""
    if parse_residual(config.residual).depends_on_ranks and config.ranks is None:
        return dataclasses.replace(config, ranks=tensor)
    return config


with jax.core.eval_context():  # this may be imported inside a trace
    _EAGER = core.get_opaque_trace_state()


def tracing() -> bool:
    """Whether the caller runs under `jax.jit`, `jax.grad`, `jax.vmap` or the like, even with
    concrete arguments.
    """
    return core.get_opaque_trace_state() != _EAGER


def without_mesh() -> contextlib.AbstractContextManager:
    """A context in which `jax.set_mesh` has set none; the same one in a trace, where that cannot be
    changed.
    """
    around = jax.sharding.get_abstract_mesh()
    return contextlib.nullcontext() if around.empty or tracing() else jax.set_mesh(None)


def apart(compiled: Callable) -> Callable:
    """A compiled function whose results are for other programs of ours: it leaves them on the mesh
    of its arguments, whichever `jax.set_mesh` has set.
    """

    @functools.wraps(compiled)
    def called(*args):
        with without_mesh():
            return compiled(*args)

    return called


def place(
    part: Callable[[tuple[slice, ...]], np.ndarray],
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    """The array of `shape` whose shards `part(index)` returns, one after another, padded with zeros
    at the end.

    A device may keep using the memory of the returned array, which therefore must not change
    afterwards.
    """
    shards = []
    whole = sharding.shard_shape(shape)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        values = part(index)
        if values.shape != whole:
            missing = [(0, size - have) for size, have in zip(whole, values.shape)]
            values = np.pad(values, missing)
        shards.append(jax.device_put(values, device).block_until_ready())
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    # in place: `device=` makes a copy more
    make = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)
    return make(shape, dtype)


@apart
@functools.partial(jax.jit, donate_argnums=0)
def put(stack: Any, layer: Any, index: int) -> Any:
    """`stack` [L, ...], an array or a tree of them, with `layer` written at `index`; the given
    stack is consumed.
    """
    return jax.tree.map(
        lambda s, a: jax.lax.dynamic_update_index_in_dim(s, a, index, 0), stack, layer
    )


def _ranks(mesh, axes):
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
