"""A device's memory that does not suffice: said in one line, with the command that finds what fits."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from ladder_jax.config import ModelConfig, RunConfig, presets
from ladder_jax.errors import UserError
from ladder_jax.schedule.hardware import HARDWARE

# The beginnings of `jax.Device.device_kind`, the longer first.
KINDS = {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v6": "v6e", "TPU7x": "tpu7x"}


@contextlib.contextmanager
def explained(config: RunConfig, *, mesh: Mesh) -> Iterator[None]:
    """What jax raises for want of memory, compiling or running, as a UserError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        _, exhausted, said = str(error).partition("RESOURCE_EXHAUSTED: ")
        if not exhausted:
            raise
        kind = mesh.devices.flat[0].device_kind
        raise UserError(
            f"not enough memory on {kind} for mesh {_sizes(mesh)}, train.remat={config.train.remat.value},"
            f" train.accumulate={config.train.accumulate} ({said.strip().splitlines()[0].rstrip('.')[:200]});"
            f" what fits says: {command(config, mesh=mesh)}"
        ) from None


def command(config: RunConfig, *, mesh: Mesh) -> str:
    """The words that ask the planner about this run."""
    train = config.train
    return (
        f"ladder-jax plan {_model(config.model)} --target {target_of(mesh)} --tokens {train.batch * train.sequence}"
        f" --sequence {train.sequence}"
    )


def target_of(mesh: Mesh) -> str:
    """The mesh's devices as the name of a target, or TARGET where none is of that kind."""
    devices = list(mesh.devices.flat)
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        return f"cpu:{len(devices)}"
    if name := next((name for beginning, name in KINDS.items() if kind.startswith(beginning)), None):
        ends = [max(place) + 1 - min(place) for place in zip(*(device.coords for device in devices))]
        flat = name in ("v5e", "v6e")
        return f"{name}:{'x'.join(map(str, ends[:2] if flat else ends))}"
    return next((f"{name}:{len(devices)}" for name in HARDWARE if name.upper() in kind), "TARGET")


def _model(config: ModelConfig) -> str:
    for name in presets.NAMES:
        if dataclasses.replace(presets.preset(name), residual=config.residual, ranks=config.ranks) == config:
            return f"--model {name} --residual {config.residual}"
    return "--model CONFIG"


def _sizes(mesh: Mesh) -> str:
    return " x ".join(str(mesh.shape[axis]) for axis in ("data", "fsdp", "tensor"))
