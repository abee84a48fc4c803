"""Ladder Residual for JAX and Flax: tensor parallelism that does not wait for the wire."""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "ModelConfig": "config",
    "MeshConfig": "config",
    "TrainConfig": "config",
    "DecodeConfig": "config",
    "RunConfig": "config",
    "preset": "config",
    "make_mesh": "parallel",
    "Transformer": "nn",
    "residual": "residual",
    "schedule": "schedule",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    """Import on first use: `import ladder_jax` alone does not load jax."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ladder_jax' has no attribute {name!r}")
    module = importlib.import_module(f"ladder_jax.{_HOMES[name]}")
    return module if _HOMES[name] == name else getattr(module, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
