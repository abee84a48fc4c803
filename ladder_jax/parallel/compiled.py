"""Functions that run on every rank of a mesh, and `jax.jit` with compiler options for its devices;
and what jax is set to where the user has set nothing: its platform, its cache of programs.

A program runs on the mesh of its `Layout`. A caller's mesh may have other names and Explicit axes,
and be set by `jax.set_mesh`: `on_own_mesh` changes arguments to ours, and results to the caller's.
Over the same devices that moves nothing but what is split otherwise.
"""

import contextlib
import functools
import glob
import logging
import os
import re
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ladder_jax import files
from ladder_jax.errors import UserError
from ladder_jax.parallel.collectives import EMULATED, kind_of
from ladder_jax.parallel.compiler_options import TABLE, Traits
from ladder_jax.parallel.mesh import SHARDED, Layout, tracing, without_mesh

LEVEL = "xla_backend_optimization_level"
logger = logging.getLogger("ladder_jax")

Dims = Any  # a pytree prefix of strings such as "BTV"

DRIVERS = (
    "/dev/nvidia*",
    "/dev/nvhost*",
    "/dev/nvgpu*",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/accel*",
    "/dev/vfio/[0-9]*",
)
"""The files of NVIDIA's, AMD's and TPUs' drivers; `dxg` is that of a GPU in Windows' Linux."""


def cache_programs[T](make: Callable[..., T]) -> Callable[..., T]:
    """`functools.cache` of a function of a model that makes its programs, for the newest 64 models: a
    sweep would keep those of all, and on CPUs Linux allows a process about 1,300 programs.
    """
    of_model = functools.lru_cache(maxsize=64)(
        lambda model: functools.cache(functools.partial(make, model))
    )

    @functools.wraps(make)
    def cached(model, *args, **settings):
        return of_model(model)(*args, **settings)

    cached.cache_clear = of_model.cache_clear
    return cached


def options_for(device_kind: str, traits: Traits, *, rescue: bool = False) -> dict[str, Any]:
    """The table's options for a kind of device; none for a CPU, which hides nothing."""
    rows = TABLE.get(kind_of(device_kind), ())
    return {row.name: row.value for row in rows if row.rescue is rescue and row.serves(traits)}


def compile_options(mesh: Mesh, *, traits: Traits, rescue: bool = False) -> dict[str, Any]:
    """For `jax.jit(..., compiler_options=...)` of a program on `mesh`.

    An option that the installed compiler does not know is dropped, with a notice.
    """
    device = mesh.devices.flat[0]
    wanted = options_for(device.device_kind, traits, rescue=rescue)
    return {name: value for name, value in wanted.items() if _known(name, value, device)}


def initializer_options(mesh: Mesh) -> dict[str, int]:
    """Compiler options of a program that draws initial values.

    At level 3, the default, XLA takes longer to compile the generator's loops for CPUs than at
    level 2, and they run no faster. A level in XLA_FLAGS stays.
    """
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return {LEVEL: 2} if is_cpu and LEVEL not in os.environ.get("XLA_FLAGS", "") else {}


@functools.cache
def _known(name, value, device):
    """Compiles the smallest program with the option: the compiler raises an error for one that it
    does not know.
    """
    here = jax.sharding.SingleDeviceSharding(device)
    probe = jax.jit(lambda x: x, compiler_options={name: value})
    try:
        probe.lower(jax.ShapeDtypeStruct((), "float32", sharding=here)).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        logger.warning("the compiler for %s does not know %s: dropped", device.device_kind, name)
        return False
    return True


def on_mesh(fn: Callable, *, layout: Layout, in_dims: Dims, out_dims: Dims) -> Callable:
    """`fn` of one rank's shards as a function of global arrays, on the layout's own mesh, wherever
    it is called.
    """
    mapped = over_mesh(fn, layout=layout, in_dims=in_dims, out_dims=out_dims)
    return on_own_mesh(mapped, layout=layout, out_dims=out_dims)


def over_mesh(fn: Callable, *, layout: Layout, in_dims: Dims, out_dims: Dims) -> Callable:
    """`jax.shard_map` over the whole mesh, fully manual and type-checked, by dimension names.

    `fn` sees one rank's shards. Only an emulation is not type-checked: jax has no varying types for
    the collectives of a `vmap`.
    """
    in_specs, out_specs = jax.tree.map(layout.spec, (in_dims, out_dims))
    checked = not layout.emulated
    return jax.shard_map(
        fn, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=checked
    )


def on_own_mesh(fn: Callable, *, layout: Layout, out_dims: Any) -> Callable:
    """`fn`, a function of global arrays on the layout's own mesh, wherever it is called. out_dims:
    of its results.
    """
    own = NamedSharding(layout.mesh.abstract_mesh, PartitionSpec())

    @jax.jit  # outside of a trace, too, jax knows no arrays of other meshes than the one set
    @functools.wraps(fn)
    def changed(*args):
        around = mesh_around(args, layout=layout)
        with jax.sharding.use_abstract_mesh(own.mesh):
            out = fn(*jax.tree.map(lambda a: _changed(a, own), args))
        return _map(functools.partial(_given_back, around=around, layout=layout), out_dims, out)

    @functools.wraps(fn)
    def called(*args):
        return fn(*args) if mesh_around(args, layout=layout) is None else changed(*args)

    return called


def as_stored(arrays: Any, *, dims: Any, layout: Layout) -> Any:
    """`arrays`, which lie along Auto axes of the caller's mesh as they are stored: so do their
    gradients then. Where ranks share heads, a compiler splits these as no partition of that mesh.
    """
    around = mesh_around(arrays, layout=layout)
    if layout.given.is_own or around != layout.given.mesh.abstract_mesh or not around.auto_axes:
        return arrays

    def stored(array, dims):
        split = layout.sharding_on(around, array.shape, dims=dims, axes=around.auto_axes)
        return jax.lax.with_sharding_constraint(array, split)

    return _map(stored, dims, arrays)


def mesh_around(args: Any, *, layout: Layout) -> AbstractMesh | None:
    """The mesh that results belong on, if it is not the layout's own: the one that is set, or else
    the caller's.

    Raises UserError where the one that is set has another number of devices.
    """
    own = layout.mesh.abstract_mesh
    around = jax.sharding.get_abstract_mesh()
    of_args = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(args))
    explicit = next((mesh for mesh in of_args if mesh.explicit_axes), None)
    if around.empty:
        around = explicit or (own if layout.given.is_own else layout.given.mesh.abstract_mesh)
    if around.manual_axes or (around == own and explicit is None):
        return None
    if around.size != own.size:
        raise UserError(
            f"the mesh set by jax.set_mesh has {around.size} devices, and this model's {own.size}:"
            " make the model with mesh=jax.sharding.get_mesh(), or call it outside"
        )
    return around


def over_ranks(fn: Callable, *, layout: Layout, in_dims: tuple, out_dims: Dims) -> Callable:
    """`fn` itself on a real tensor axis; where the ranks are emulated, all of them on this device.

    The emulation splits each argument along its tensor-parallel dimension, computes every rank
    under one named axis, over which the collectives work as on a mesh, and joins the results.
    It must stand inside `jax.grad`: only then is a gradient that of the whole function.

    ladder-fresh and desync are functions of the number of ranks, and on one GPU or TPU chip nothing
    else computes them.
    """
    if not layout.emulated:
        return fn

    def emulated(*args):
        split = _map(functools.partial(_split, ranks=layout.ranks), in_dims, args)
        in_axes, out_axes = jax.tree.map(_position, (in_dims, out_dims))
        every = jax.vmap(
            fn,
            in_axes=in_axes,
            out_axes=out_axes,
            axis_name=EMULATED,
            axis_size=layout.ranks,  # as no argument may be split
        )
        return _map(_join, out_dims, every(*split))

    return emulated


class Compiled:
    """`jax.jit(fn)` with compiler options for its mesh; if the compiler fails on them, with fewer
    and a notice.

    v5e's options are fragile: its fusions of reductions and matmuls may not fit the vector memory.
    `options` are those in force, for a program of these `traits`.

    Inside a trace it is `jax.jit(fn)` without options, which jax refuses there, and without
    donation: both belong to the outermost program. Results are on the mesh of `jax.set_mesh`, if it
    is another than the model's; outside of a trace, what a program hands to its next call stays
    where it is: of those that donate, or have `out_shardings`.
    """

    def __init__(
        self,
        fn: Callable,
        *,
        mesh: Mesh,
        traits: Traits,
        donate_argnums: int | Sequence[int] = (),
        out_shardings: Any = None,
    ):
        best = compile_options(mesh, traits=traits)
        rescue = compile_options(mesh, traits=traits, rescue=True)
        self.__wrapped__ = fn
        self._jit = functools.partial(
            jax.jit, fn, donate_argnums=donate_argnums, out_shardings=out_shardings
        )
        is_apart = bool(out_shardings) or donate_argnums != ()
        self._context = without_mesh if is_apart else contextlib.nullcontext
        self._left = [options for options in ({**best, **rescue}, {}) if options != best]
        self.options = best
        self.traits = traits
        self._jitted = self._jit(compiler_options=best)

    def __repr__(self) -> str:
        return f"Compiled({self.__wrapped__.__qualname__}, {self.options or 'no options'})"

    def __call__(self, *args: Any) -> Any:
        if tracing():
            return self._traced(*args)
        try:
            with self._context():
                return self._jitted(*args)
        except jax.errors.JaxRuntimeError as error:
            self._fall_back(error)
        return self(*args)

    def compile(self, *args: Any) -> jax.stages.Compiled:
        """Ahead of time, for arguments or their shapes."""
        try:
            return self.lower(*args).compile()
        except jax.errors.JaxRuntimeError as error:
            self._fall_back(error)
        return self.compile(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        with self._context():
            return self._jitted.lower(*args)

    @functools.cached_property
    def _traced(self):
        return jax.jit(self.__wrapped__)

    def _fall_back(self, error):
        """Take the next options. Raises `error` if it has another cause, or no options are left."""
        if not self._left or not _OUT_OF_VECTOR_MEMORY.search(str(error)):
            raise error
        failed = self.options
        self.options = self._left.pop(0)
        logger.warning(
            "the compiler fails with %s; now with %s: %s",
            ", ".join(failed),
            ", ".join(self.options) or "no options, so reductions are synchronous",
            str(error).splitlines()[0][:160],
        )
        self._jitted = self._jit(compiler_options=self.options)


# The compiler's two names for vector memory. It fails before the program starts, so no donated
# buffer is lost.
_OUT_OF_VECTOR_MEMORY = re.compile(r"vmem|alternate memory", re.IGNORECASE)


def use_compilation_cache() -> None:
    """Use a cache of compiled programs in this process, unless jax.config or the environment names
    one.
    """
    if (
        jax.config.jax_compilation_cache_dir is None
        and "JAX_COMPILATION_CACHE_DIR" not in os.environ
    ):
        if (folder := files.cache_folder("programs")) is not None:
            jax.config.update("jax_compilation_cache_dir", str(folder))
            # jax's default is a second, which no program of a small model takes to compile.
            if jax.config.jax_persistent_cache_min_compile_time_secs == 1:
                jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def prefer_cpu() -> None:
    """Set jax's platform to the CPU where there is nothing else, as jax itself would after its
    plugins for TPUs and GPUs have complained at length.

    Nothing changes where the user named a platform, where the machine has an accelerator, or where
    a plugin for any other hardware is installed.
    """
    if not jax.config.jax_platforms and not has_accelerator():
        jax.config.update("jax_platforms", "cpu")


def has_accelerator() -> bool:
    """Whether this machine may have an accelerator, by its drivers' files and the plugins of jax.
    Starts neither.
    """
    others = [
        plugin
        for plugin in entry_points(group="jax_plugins")
        if not plugin.name.startswith("xla_cuda")
    ]
    return bool(others) or any(glob.glob(pattern) for pattern in DRIVERS)


def _changed(array, sharding):
    return (
        array
        if jax.typeof(array).sharding.mesh == sharding.mesh
        else jax.sharding.reshard(array, sharding)
    )


def _given_back(array, *, dims, around, layout):
    """By its type along Explicit axes; along Auto ones by a constraint, as the compiler may choose
    what they cannot.
    """
    split = functools.partial(layout.sharding_on, around, array.shape, dims=dims)
    array = _changed(array, split(axes=around.explicit_axes))
    if not around.auto_axes:
        return array
    return jax.lax.with_sharding_constraint(array, split(axes=around.auto_axes))


def _map(fn, dims, tree):
    """`fn(array, its dims)` of every array of `tree`, of which `dims` is a prefix."""
    return jax.tree.map(
        lambda of, below: jax.tree.map(functools.partial(fn, dims=of), below), dims, tree
    )


def _position(dims):
    """Where the dimension stands that tensor parallelism splits, if there is one."""
    return next((index for index, dim in enumerate(dims) if dim in SHARDED), None)


def _split(array, *, dims, ranks):
    """`array` with a new dimension of ranks before the one that they split."""
    at = _position(dims)
    if at is None:
        return array
    if dims[at] == "K" and array.shape[at] < ranks:  # several ranks share a head
        array = jnp.repeat(array, ranks // array.shape[at], axis=at)
    return array.reshape(*array.shape[:at], ranks, -1, *array.shape[at + 1 :])


def _join(array, *, dims):
    at = _position(dims)
    return array if at is None else array.reshape(*array.shape[:at], -1, *array.shape[at + 2 :])
