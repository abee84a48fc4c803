"""A run that starts from a checkpoint has that one's model, but for what its own `model` section says."""

import dataclasses
import json
import pathlib
from typing import Any

from ladder_jax.config.schema import ModelConfig
from ladder_jax.errors import UserError

FUNCTION = ("ladder_layers", "ranks")
"""What belongs to a topology, and goes where another one is named."""


def with_model(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree`, in whose `model` every field stands, where its `train.start` names a checkpoint.

    Raises UserError where there is none. With a `model.preset` the fields are that one's.
    """
    train, model = tree.get("train"), tree.get("model") or {}
    path = train.get("start") if isinstance(train, dict) else None
    if not isinstance(path, str) or not isinstance(model, dict) or "preset" in model:
        return tree
    if {field.name for field in dataclasses.fields(ModelConfig)} <= model.keys():  # as in a run's config.json
        return tree
    base = _model_of(path)
    if "residual" in model:
        base = {name: value for name, value in base.items() if name not in FUNCTION}
    if any(name in model for name in ("d_model", "num_heads")):
        base.pop("head_dim", None)
    return {**tree, "model": {**base, **model}}


def _model_of(path: str) -> dict[str, Any]:
    """The `model` section of a checkpoint: at a run's folder, its `checkpoints/`, or one step's folder."""
    folder = pathlib.Path(path).expanduser()
    folder = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    steps = [int(one.name) for one in folder.iterdir() if one.name.isdigit()] if folder.is_dir() else []
    folder = folder / str(max(steps)) if steps else folder
    try:
        return dict(json.loads((folder / "meta" / "metadata").read_text(encoding="utf-8"))["config"]["model"])
    except OSError:
        raise UserError(f"train.start={path!r}: there is no checkpoint of ladder_jax there") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"train.start={path!r}: the checkpoint there is damaged, or of another program") from None
