"""Simulated devices must be asked for before jax starts."""

import os

from ladder_jax.errors import UserError

# Many devices on few cores need patience to meet.
SIMULATION_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def prepare_devices(cpu_devices: int | None) -> None:
    """Simulate `cpu_devices` devices, if that is not None. Raises UserError below one."""
    if cpu_devices is not None:
        if cpu_devices < 1:
            raise UserError(f"--cpu-devices must be positive, not {cpu_devices}")
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
    if os.environ.get("JAX_NUM_CPU_DEVICES") and SIMULATION_TIMEOUT.split("=")[0] not in os.environ.get(
        "XLA_FLAGS", ""
    ):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {SIMULATION_TIMEOUT}".strip()
