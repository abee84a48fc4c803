"""From a preset's name, a YAML or JSON file and dotted overrides to one RunConfig, and back to
JSON.
"""

import contextlib
import dataclasses
import enum
import importlib
import json
import os
import pathlib
import typing

from ladder_jax.config.fields import build, check_type
from ladder_jax.config.model import PRESETS, ModelConfig, changed, preset_fields, recipe
from ladder_jax.config.run import RunConfig
from ladder_jax.errors import UserError, unknown

type Json = dict[str, typing.Any]  # a JSON object

TOPOLOGY = ("ladder_layers", "ranks")
"""Fields of the section `model` that belong to its `residual`."""


def is_file(name: str | pathlib.Path) -> bool:
    """Whether it names a configuration file, by its ending."""
    return pathlib.Path(name).suffix in (".yaml", ".yml", ".json")


def load(source: str | pathlib.Path, *, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """The configuration that `source` (a file, or a preset's name) and `a.b=value` overrides
    describe.

    Raises UserError for an unknown key or preset, a wrong type or an impossible value.
    """
    check_type("a configuration", source, str, os.PathLike)
    check_type("overrides", overrides, list, tuple)
    path = pathlib.Path(source)
    if is_file(path):
        tree = read_yaml(path, what="configuration")
        tree = {} if tree is None else tree
        if not isinstance(tree, dict):
            raise UserError(
                f"configuration {str(path)!r} must hold sections such as 'model:', not"
                f" {type(tree).__name__}"
            )
        tree.setdefault("run", {})
        if isinstance(tree["run"], dict):
            tree["run"].setdefault("name", path.stem)
    elif source in PRESETS:
        tree = {"model": {"preset": source}, "train": recipe(source), "run": {"name": source}}
    else:
        raise unknown("configuration (not a .yaml or .json file)", source, PRESETS)
    for override in overrides:
        _set(tree, override)
    return from_dict(_with_model_of_start(tree))


def from_dict(tree: dict) -> RunConfig:
    """`model` may name a `preset` to start from: `{"model": {"preset": "tiny", "residual":
    "ladder"}}`.
    """
    check_type("a configuration", tree, dict)
    model = tree.get("model")
    if isinstance(model, dict):
        rest = dict(model)
        base = preset_fields(str(rest.pop("preset"))) if "preset" in rest else {}
        model = build(ModelConfig, changed(base, rest), "model.", more=("preset",))
        tree = {**tree, "model": model}
    return build(RunConfig, tree, "")


def model_from_dict(tree: dict) -> ModelConfig:
    """The inverse of `to_dict` for a model's configuration, as a checkpoint stores it."""
    return build(ModelConfig, tree, "model.")


def to_dict(config: object) -> typing.Any:
    """Plain JSON values; `from_dict` gives the configuration back."""
    if dataclasses.is_dataclass(config):
        return {
            field.name: to_dict(getattr(config, field.name)) for field in dataclasses.fields(config)
        }
    return config.value if isinstance(config, enum.Enum) else config


def _with_model_of_start(tree: Json) -> Json:
    """`tree`, whose section `model` is completed from the model that `train.start` names, if it
    names one.

    A `model.preset` goes first. With another `residual` the checkpoint's topology does not count,
    with another shape its head_dim. Raises UserError where there is no such model.
    """
    train = tree.get("train")
    model = tree.get("model") or {}
    path = train.get("start") if isinstance(train, dict) else None
    if not isinstance(path, str) or not isinstance(model, dict) or "preset" in model:
        return tree
    # of a run's config.json
    if {field.name for field in dataclasses.fields(ModelConfig)} <= model.keys():
        return tree
    pretrained = importlib.import_module("ladder_jax.pretrained")  # by its name: it needs jax
    try:
        base = to_dict(pretrained.model_config(path))
    except UserError as error:
        raise UserError(f"train.start: {error}") from None
    if "residual" in model:
        base = {name: value for name, value in base.items() if name not in TOPOLOGY}
    if any(name in model for name in ("d_model", "num_heads")):
        base.pop("head_dim", None)
    return {**tree, "model": changed(base, model)}


def read_yaml(path: typing.Any, *, what: str) -> typing.Any:
    """The value of a YAML or JSON file. PyYAML reads no JSON with tabs, or with escaped emojis."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {what} {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{what} {str(path)!r} is not UTF-8 text") from None
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text, object_pairs_hook=_section)
    return parse_yaml(text, what=f"{what} {str(path)!r}")


def _section(pairs: list[tuple[str, typing.Any]]) -> dict[str, typing.Any]:
    """Raises ValueError where a name stands twice: as YAML it has a message."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise ValueError
    return tree


def _set(tree: dict, override: str) -> None:
    check_type("an override", override, str)
    dotted, equals, text = override.partition("=")
    if not equals or not all(dotted.split(".")):
        raise UserError(f"override {override!r} is not of the form path.to.field=value")
    *sections, field = dotted.split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise UserError(f"override {override!r}: {section!r} is a single value")
    try:
        value = parse_yaml(text, what=override)
    except UserError:
        value = text
    # in an override nothing is a comment: YAML reads run.dir='exp #1' as "exp"
    is_cut = isinstance(value, str) and value and text.startswith(value)
    tree[field] = text.strip() if is_cut or text.startswith("#") else value


def parse_yaml(text: str, *, what: str) -> typing.Any:
    """The value of a YAML text. Raises UserError "`what` is not YAML: ...", also for a name that
    stands twice in one mapping, of which PyYAML would take the last.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            seen = set()
            for key, _ in node.value:
                name = str(key.value)
                if name in seen:
                    raise ValueError(
                        f"{name!r} stands there twice, again in line {key.start_mark.line + 1}"
                    )
                seen.add(name)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except Exception as error:  # PyYAML raises errors of many kinds for dates, numbers and tags
        raise UserError(
            f"{what} is not YAML: {' '.join(str(error).split())[:300] or type(error).__name__}"
        ) from None
