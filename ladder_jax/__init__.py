"""Ladder Residual for JAX and Flax: tensor parallelism whose all-reduces overlap with compute."""

import importlib

__version__ = "0.1.0"

_PACKAGES = {
    "ModelConfig": "config",
    "MeshConfig": "config",
    "TrainConfig": "config",
    "DecodeConfig": "config",
    "RunConfig": "config",
    "preset": "config",
    "presets": "config",
    "make_mesh": "parallel",
    "mesh_of": "parallel",
    "Transformer": "pretrained",
    "from_pretrained": "pretrained",
    "load": "pretrained.transformer",
    "nn": "nn",
    "pretrained": "pretrained",
    "residual": "residual",
    "schedule": "schedule",
}

__all__ = list(_PACKAGES)


def __getattr__(name: str):
    """Import on first use: `import ladder_jax` alone does not load jax."""
    if name not in _PACKAGES:
        raise AttributeError(f"module 'ladder_jax' has no attribute {name!r}")
    module = importlib.import_module(f"ladder_jax.{_PACKAGES[name]}")
    return module if _PACKAGES[name] == name else getattr(module, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
