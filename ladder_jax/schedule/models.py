"""The model that `--model` names: its configuration, without weights."""

import pathlib

from ladder_jax.config import PRESETS, ModelConfig, load, preset
from ladder_jax.errors import UserError, unknown


def by_name(name: str) -> ModelConfig:
    """A preset's, a configuration file's, or that of a model in any format: see
    `pretrained.model_config`.

    Imports jax only for the last. Raises UserError for an unknown name.
    """
    if name in PRESETS:
        return preset(name)
    path = pathlib.Path(name).expanduser()
    if path.suffix in (".yaml", ".yml", ".json"):
        return load(name, model_of=_of_model).model
    if "/" not in name and not path.exists():
        also = "a configuration file, a run's or a Hugging Face folder, a GGUF file, or org/name of the Hub"
        raise UserError(f"{unknown('preset', name, PRESETS)}, nor is there {also} of that name")
    return _of_model(name)


def check_alone(config: ModelConfig, *, verb: str) -> None:
    """Raises UserError for a model with a side network, whose matrices the verb's formulas do not
    have.
    """
    if config.side is not None:
        raise UserError(f"ladder-jax {verb} does not count a side network (model.side)")


def _of_model(name: str) -> ModelConfig:
    from ladder_jax.pretrained import model_config

    return model_config(name)
