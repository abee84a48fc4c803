"""From a preset's name, a YAML or JSON file and dotted overrides to one RunConfig, and back to JSON."""

import dataclasses
import enum
import pathlib
import typing

from ladder_jax.config import presets, start
from ladder_jax.config.schema import ModelConfig, RunConfig, build
from ladder_jax.errors import UserError, unknown


def load(source: str, *, overrides: typing.Sequence[str] = ()) -> RunConfig:
    """The configuration that `source` (a file, or a preset's name) and `a.b=value` overrides describe.

    Raises UserError for an unknown key or preset, a wrong type or an impossible value.
    """
    path = pathlib.Path(source)
    if path.suffix in (".yaml", ".yml", ".json"):
        tree = _read(path)
        tree.setdefault("run", {})
        if isinstance(tree["run"], dict):
            tree["run"].setdefault("name", path.stem)
    elif source in presets.NAMES:
        tree = {"model": {"preset": source}, "train": presets.recipe(source), "run": {"name": source}}
    else:
        raise unknown("configuration (not a .yaml or .json file)", source, presets.NAMES)
    for override in overrides:
        _set(tree, override)
    return from_dict(start.with_model(tree))


def from_dict(tree: dict) -> RunConfig:
    """`model` may name a `preset` to start from: `{"model": {"preset": "tiny", "residual": "ladder"}}`."""
    model = tree.get("model")
    if isinstance(model, dict):
        rest = {key: value for key, value in model.items() if key != "preset"}
        base = presets.settings(str(model["preset"])) if "preset" in model else {}
        tree = {**tree, "model": build(ModelConfig, {**base, **rest}, "model.", more=("preset",))}
    return build(RunConfig, tree, "")


def model_from_dict(tree: dict) -> ModelConfig:
    """The inverse of `to_dict` for a model's configuration, as a checkpoint stores it."""
    return build(ModelConfig, tree, "model.")


def to_dict(config: object) -> typing.Any:
    """Plain JSON values; `from_dict` gives the configuration back."""
    if dataclasses.is_dataclass(config):
        return {field.name: to_dict(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return config.value if isinstance(config, enum.Enum) else config


def _read(path: pathlib.Path) -> dict:
    import yaml  # every JSON file is YAML too

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read configuration {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"configuration {str(path)!r} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise UserError(f"configuration {str(path)!r} is not YAML or JSON: {' '.join(str(error).split())}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UserError(f"configuration {str(path)!r} must hold sections such as 'model:', not {type(tree).__name__}")
    return tree


def _set(tree: dict, override: str) -> None:
    import yaml

    dotted, equals, text = override.partition("=")
    if not equals or not all(dotted.split(".")):
        raise UserError(f"override {override!r} is not of the form path.to.field=value")
    *sections, field = dotted.split(".")
    for section in sections:
        below = tree.setdefault(section, {})
        if below is None:
            below = tree[section] = {}
        if not isinstance(below, dict):
            raise UserError(f"override {override!r}: {section!r} is a single value")
        tree = below
    try:
        tree[field] = yaml.safe_load(text)
    except yaml.YAMLError:
        tree[field] = text
