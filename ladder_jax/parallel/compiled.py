"""`jax.jit` with compiler options for the mesh's devices, and what replaces options on which the compiler fails."""

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh

from ladder_jax import files
from ladder_jax.config import CollectiveMatmul
from ladder_jax.errors import UserError
from ladder_jax.parallel.compiler_options import TABLE, Traits, When

logger = logging.getLogger("ladder_jax")

ALIASES = {"TPU v5e": "TPU v5 lite", "TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite"}  # what some versions call them


def kind_of(device_kind: str) -> str:
    """The table's name for a kind of device (`jax.Device.device_kind`)."""
    return "NVIDIA" if device_kind.startswith("NVIDIA") else ALIASES.get(device_kind, device_kind)


def is_v5e(device_kind: str) -> bool:
    """v5e is the one TPU that overlaps reductions by fusing them with matmuls, in its vector memory."""
    return kind_of(device_kind) == "TPU v5 lite"


def options_for(device_kind: str, traits: Traits, *, when: When = When.ALWAYS) -> dict[str, Any]:
    """The table's options for a kind of device; none for a CPU, which hides nothing."""
    rows = TABLE.get(kind_of(device_kind), ())
    return {row.name: row.value for row in rows if row.when is when and row.serves(traits)}


def compile_options(mesh: Mesh, *, traits: Traits, when: When = When.ALWAYS) -> dict[str, Any]:
    """For `jax.jit(..., compiler_options=...)` of a program on `mesh`.

    An option that the installed compiler does not know is dropped, with a notice. Raises UserError where a program's
    collective matmuls are to be made by a compiler that makes none.
    """
    device = mesh.devices.flat[0]
    check_compiler_makes(traits.collective_matmul, mesh=mesh)
    wanted = options_for(device.device_kind, traits, when=when)
    return {name: value for name, value in wanted.items() if _known(name, value, device)}


def check_compiler_makes(form: CollectiveMatmul, *, mesh: Mesh) -> None:
    """Raises UserError for collective matmuls by the compiler where it makes none: on other devices than TPUs."""
    if form is CollectiveMatmul.COMPILER and (platform := mesh.devices.flat[0].platform) != "tpu":
        what = "collective_matmul 'compiler' is an option of XLA for TPUs"
        raise UserError(f"{what}, and this mesh is of {platform}: use 'ring'")


@functools.cache
def _known(name, value, device):
    """Compiles the smallest program with the option: the compiler raises an error for one that it does not know."""
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


with jax.core.eval_context():  # this may be imported inside a trace
    _EAGER = core.get_opaque_trace_state()


def tracing() -> bool:
    """Whether the caller runs under `jax.jit`, `jax.grad`, `jax.vmap` or the like, even with concrete arguments."""
    return core.get_opaque_trace_state() != _EAGER


def without_mesh() -> contextlib.AbstractContextManager:
    """A context in which `jax.set_mesh` has set none; the same one in a trace, where that cannot be changed."""
    around = jax.sharding.get_abstract_mesh()
    return contextlib.nullcontext() if around.empty or tracing() else jax.set_mesh(None)


def apart(compiled: Callable) -> Callable:
    """A compiled function whose results are for other programs of ours: it leaves them on the mesh of its arguments,
    whichever `jax.set_mesh` has set."""

    @functools.wraps(compiled)
    def called(*args):
        with without_mesh():
            return compiled(*args)

    return called


class Compiled:
    """`jax.jit(fn)` with compiler options for its mesh; if the compiler fails on them, with fewer and a notice.

    v5e's options are fragile: its fusions of reductions and matmuls may not fit the vector memory.
    `options` are those in force, for a program of these `traits`.

    Inside a trace it is `jax.jit(fn)` without options, which jax refuses there, and without donation: both belong to
    the outermost program. Results are on the mesh of `jax.set_mesh`, if it is another than the model's; outside of a
    trace, what a program hands to its next call stays where it is: of those that donate, or have `out_shardings`.
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
        rescue = compile_options(mesh, traits=traits, when=When.RESCUE)
        self.__wrapped__ = fn
        self._jit = functools.partial(jax.jit, fn, donate_argnums=donate_argnums, out_shardings=out_shardings)
        self._is_apart = bool(out_shardings) or donate_argnums != ()
        self._left = [options for options in ({**best, **rescue}, {}) if options != best]
        self.options = best
        self.traits = traits
        self._jitted = self._jit(compiler_options=best)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items()) or "no options"
        return f"Compiled({self.__wrapped__.__qualname__}, {options})"

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

    def _context(self):
        return without_mesh() if self._is_apart else contextlib.nullcontext()

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


# The compiler's two names for vector memory. It fails before the program starts, so no donated buffer is lost.
_OUT_OF_VECTOR_MEMORY = re.compile(r"vmem|alternate memory", re.IGNORECASE)


def use_compilation_cache() -> None:
    """Use a cache of compiled programs in this process, unless jax.config or the environment names one."""
    if jax.config.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        if (folder := files.cache_folder("programs")) is not None:
            jax.config.update("jax_compilation_cache_dir", str(folder))
