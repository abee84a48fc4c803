"""Compiler options that make collectives asynchronous: from one table, for all that compiles."""

import functools
import logging
from typing import Any

import jax
from jax.sharding import Mesh

from ladder_jax.parallel.table import TABLE
from ladder_jax.parallel.traits import Traits, When

logger = logging.getLogger("ladder_jax")

ALIASES = {"TPU v5e": "TPU v5 lite", "TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite"}  # what some versions call them


def is_v5e(device_kind: str) -> bool:
    """Whether it is the one TPU whose reductions are overlapped by being fused with matmuls, in its vector memory."""
    return ALIASES.get(device_kind, device_kind) == "TPU v5 lite"


def options_for(device_kind: str, traits: Traits, *, when: When = When.ALWAYS) -> dict[str, Any]:
    """The table's options for a kind of device (`jax.Device.device_kind`); none for a CPU, which hides nothing."""
    kind = "NVIDIA" if device_kind.startswith("NVIDIA") else ALIASES.get(device_kind, device_kind)
    return {row.name: row.value for row in TABLE.get(kind, ()) if row.when is when and row.serves(traits)}


def compile_options(mesh: Mesh, *, traits: Traits, when: When = When.ALWAYS) -> dict[str, Any]:
    """What to hand to `jax.jit(..., compiler_options=...)` for a program on `mesh`.

    An option that the installed compiler does not know is dropped, with a notice.
    """
    device = mesh.devices.flat[0]
    wanted = options_for(device.device_kind, traits, when=when)
    return {name: value for name, value in wanted.items() if _known(name, value, device)}


@functools.cache
def _known(name: str, value: bool | int | float | str, device: jax.Device) -> bool:
    """Asks the compiler, with the smallest program: an unknown option is an error."""
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
