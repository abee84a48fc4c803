"""Eight simulated devices, and programs that compile quickly: set before jax is imported."""

import os

FLAGS = "--xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_backend_optimization_level=0"


def simulate() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
