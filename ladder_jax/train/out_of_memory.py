"""Too little memory on a device: one line, with the `ladder-jax plan` command that finds settings
that fit.
"""

import dataclasses

import jax
from jax.sharding import Mesh

from ladder_jax.config import PRESETS, Interleave, ModelConfig, RunConfig, preset
from ladder_jax.errors import UserError
from ladder_jax.hardware import HARDWARE, machine_of


def explanation(
    error: jax.errors.JaxRuntimeError, *, config: RunConfig, mesh: Mesh
) -> UserError | None:
    """The message for an error of jax, in compiling or running, that memory ran out; None for any
    other error.
    """
    _, exhausted, details = str(error).partition("RESOURCE_EXHAUSTED: ")
    if not exhausted:
        return None
    kind = mesh.devices.flat[0].device_kind
    if config.model.moe is None and config.model.side is None:
        fits = f"settings that fit: {command(config, mesh=mesh)}"
    else:
        fits = "a larger mesh.fsdp or mesh.tensor, train.remat=full or a larger train.accumulate needs less"
    halves = (
        ""
        if config.train.interleave is Interleave.WHOLE
        else f", train.interleave={config.train.interleave.value}"
    )
    return UserError(
        f"not enough memory on {kind} for mesh {_sizes(mesh)}, train.remat={config.train.remat.value},"
        f" train.accumulate={config.train.accumulate}{halves} ({details.strip().splitlines()[0].rstrip('.')[:200]});"
        f" {fits}"
    )


def command(config: RunConfig, *, mesh: Mesh) -> str:
    """The planner's command line for this run."""
    train = config.train
    return (
        f"ladder-jax plan {_model(config.model)} --target {target_of(mesh)} --tokens {train.batch * train.sequence}"
        f" --sequence {train.sequence}"
    )


def target_of(mesh: Mesh) -> str:
    """The planner's name of the mesh's devices; TARGET where it has none for their kind."""
    devices = list(mesh.devices.flat)
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        return f"cpu:{len(devices)}"
    if kind.startswith("TPU") and (name := machine_of(kind)):
        ends = [
            max(place) + 1 - min(place) for place in zip(*(device.coords for device in devices))
        ]
        flat = name in ("v5e", "v6e")
        return f"{name}:{'x'.join(map(str, ends[:2] if flat else ends))}"
    return next((f"{name}:{len(devices)}" for name in HARDWARE if name.upper() in kind), "TARGET")


def _model(config: ModelConfig) -> str:
    for name in PRESETS:
        if (
            dataclasses.replace(preset(name), residual=config.residual, ranks=config.ranks)
            == config
        ):
            return f"--model {name} --residual {config.residual}"
    return "--model CONFIG"


def _sizes(mesh: Mesh) -> str:
    return " x ".join(str(mesh.shape[axis]) for axis in ("data", "fsdp", "tensor"))
