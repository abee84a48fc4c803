"""From a preset's name, a YAML or JSON file and dotted overrides to one RunConfig, and back to JSON."""

import dataclasses
import enum
import json
import pathlib
import types
import typing

from ladder_jax.config import presets, start
from ladder_jax.config.schema import ModelConfig, RunConfig
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
    if isinstance(model, dict) and "preset" in model:
        rest = {key: value for key, value in model.items() if key != "preset"}
        base = {key: to_dict(value) for key, value in presets.settings(str(model["preset"])).items()}
        tree = {**tree, "model": {**base, **rest}}
    return _build(RunConfig, tree, "")


def model_from_dict(tree: dict) -> ModelConfig:
    """The inverse of `to_dict` for a model's configuration, as a checkpoint stores it."""
    return _build(ModelConfig, tree, "model.")


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


def _build(cls: type, tree: object, path: str) -> typing.Any:
    """A dataclass of type `cls` from plain values; `path` is the dotted prefix for messages."""
    if not isinstance(tree, dict):
        raise UserError(f"{path.rstrip('.') or 'the configuration'} must be a section, not {tree!r}")
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in hints:
            extra = ("preset",) if cls is ModelConfig else ()
            raise unknown("setting", f"{path}{key}", [path + name for name in (*hints, *extra)])
    return cls(**{key: _coerce(value, hints[key], path + key) for key, value in tree.items()})


def _coerce(value: object, hint: typing.Any, path: str) -> typing.Any:
    """`value` as the type `hint`, or a UserError. Only exact or lossless conversions are made."""
    if isinstance(hint, types.UnionType):  # X | None
        if value is None:
            return None
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, path + ".")
    if issubclass(hint, enum.Enum):
        allowed = [member.value for member in hint]
        if value not in allowed:
            # YAML reads a bare `none` as text but `null` and an empty value as nothing.
            raise unknown(f"value for {path}:", value, allowed)
        return hint(value)
    if hint is str and path.endswith(".ladder_layers"):  # 2, "0,2" and [0, 2] all name layers
        if isinstance(value, list):
            return ",".join(map(str, value)) + ","
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            value = float(value)  # YAML 1.1 reads 3e-4 as text
        except ValueError:
            pass
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise UserError(f"{path} must be of type {hint.__name__}, not {json.dumps(value, default=str)}")
    if hint is float and value != value:
        raise UserError(f"{path} must be a number, not nan")
    return value
