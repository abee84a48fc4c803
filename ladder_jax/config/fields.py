"""Type conversion and checks of the sections' fields, alike for a file, an override and Python."""

import dataclasses
import enum
import functools
import json
import os
import reprlib
import typing
from collections.abc import Mapping

from ladder_jax.errors import UserError, described, unknown

POSITIVE = (lambda value: value > 0, "be positive")
NOT_NEGATIVE = (lambda value: value >= 0, "not be negative")

# Types of fields: a number, and what it must be.
type Count = typing.Annotated[int, POSITIVE]
type Positive = typing.Annotated[float, POSITIVE]
type CountOrZero = typing.Annotated[int, NOT_NEGATIVE]
type PositiveOrZero = typing.Annotated[float, NOT_NEGATIVE]
# of training: beyond it float32 has 0 or infinity
type Factor = typing.Annotated[
    float, (lambda value: 1e-37 <= value <= 1e37, "be between 1e-37 and 1e37")
]
type FactorOrZero = typing.Annotated[
    float,
    (lambda value: value == 0 or 1e-37 <= value <= 1e37, "be 0, or between 1e-37 and 1e37"),
]
# beyond it penalised logits, or these over a temperature, are no finite float32
type Penalty = typing.Annotated[
    float, (lambda value: 1e-6 <= value <= 1e30, "be between 1e-6 and 1e30")
]
type Share = typing.Annotated[float, (lambda value: 0 <= value <= 1, "be between 0 and 1")]
# of a moving average; in float32, where 0.99999999 is 1
type Decay = typing.Annotated[
    float, (lambda value: 0 <= value <= 0.9999999, "be between 0 and 0.9999999")
]
type Few = typing.Annotated[int, (lambda value: 0 < value <= 10_000, "be between 1 and 10,000")]
type Seed = typing.Annotated[int, (lambda value: 0 <= value < 2**32, "be between 0 and 2**32 - 1")]


def build(cls: type, tree: object, path: str, *, more: tuple[str, ...] = ()) -> typing.Any:
    """A dataclass of type `cls` from a mapping.

    path: the dotted prefix for messages; more: other keys that a message may suggest.
    """
    if not isinstance(tree, dict):
        where = path.rstrip(".") or "the configuration"
        raise UserError(
            f"{where} must be a section (a {cls.__name__}, or a mapping of its fields), not {_json(tree)}"
        )
    for key in tree:
        if key not in _hints(cls):
            raise unknown(
                "setting", f"{path}{key}", [path + name for name in (*_hints(cls), *more)]
            )
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if dataclasses.MISSING is field.default is field.default_factory
    ]
    missing = [path + name for name in required if name not in tree]
    check(not missing, f"missing: {', '.join(missing)}")
    return cls(**tree)


def check(condition: bool, message: str) -> None:
    """Raises UserError with `message` where the condition fails."""
    if not condition:
        raise UserError(message)


def not_none[T](settings: Mapping[str, T | None]) -> dict[str, T]:
    """Those that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def natural(text: str) -> int:
    """The whole number that decimal digits are; -1 for any other text, or one with too many."""
    return int(text) if text.isdecimal() and len(text) < 20 else -1


def check_type(what: str, value: object, *kinds: type) -> None:
    """Raises UserError for a value of another type than `kinds`."""
    if not isinstance(value, kinds):
        allowed = " or ".join(kind.__name__ for kind in kinds)
        raise UserError(f"{what} must be of type {allowed}, not {described(value)}")


def passes(check: typing.Callable[..., None], *args: object, **settings: object) -> bool:
    """Whether a check raises no UserError."""
    try:
        check(*args, **settings)
    except UserError:
        return False
    return True


def shown(config: object) -> str:
    """The repr of a dataclass, as one types it: the fields that differ from their defaults, enums
    by their names. Long sequences and texts are shortened.
    """
    fields = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default
        differs = type(value) is not type(default) or value != default
        if field.repr and differs:
            text = repr(value.value) if isinstance(value, enum.Enum) else _SHORT.repr(value)
            fields.append(f"{field.name}={text}")
    return f"{type(config).__name__}({', '.join(fields)})"


class Section:
    """Base of a frozen dataclass of settings: when it is made, its fields are converted to their
    declared types, where that loses nothing, and checked.

    Text becomes the enum's member, a whole number a float, a mapping the section below. Raises
    UserError, naming the section and the field, for anything else.

    NAME: its own in messages.
    """

    NAME = ""

    __repr__ = shown

    def __post_init__(self):
        for name, hint in _hints(type(self)).items():
            path = f"{self.NAME}.{name}" if self.NAME else name
            object.__setattr__(self, name, _coerce(getattr(self, name), hint, path))
        self._check()

    def _check(self) -> None:
        """Raises UserError for other impossible values."""


_SHORT = reprlib.Repr(
    maxtuple=8, maxlist=8, maxdict=4, maxset=4, maxfrozenset=4, maxstring=120, maxother=2000
)


@functools.cache
def _hints(cls: type) -> dict[str, typing.Any]:
    return typing.get_type_hints(cls)


def _coerce(value: object, hint: typing.Any, path: str) -> typing.Any:
    """`value` as the type `hint`, or a UserError. Only exact or lossless conversions are made."""
    hint = getattr(hint, "__value__", hint)  # of an alias
    parts = typing.get_args(hint)
    if type(None) in parts:  # X | None
        return None if value is None else _coerce(value, parts[0], path)
    if typing.get_origin(hint) is typing.Annotated:
        number = _coerce(value, parts[0], path)
        holds, meaning = parts[1]
        check(holds(number), f"{path} must {meaning}, not {number}")
        return number
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else build(hint, value, path + ".")
    if issubclass(hint, enum.Enum):
        return member(hint, f"value for {path}:", value)
    # NumPy's scalars are Python's here
    if not isinstance(value, type) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if hint is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            value = float(value)  # YAML 1.1 reads 3e-4 as text
        except (ValueError, OverflowError):
            pass
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise UserError(f"{path} must be of type {hint.__name__}, not {_json(value)}")
    if hint is int and abs(value) >= 2**63:
        raise UserError(f"{path} must be between -(2**63) and 2**63")
    if hint is float and value != value:
        raise UserError(f"{path} must be a number, not nan")
    return value


def member[E: enum.Enum](kind: type[E], what: str, word: object) -> E:
    """The member of the enum `kind` whose value is `word`; a member is returned unchanged. Raises
    UserError.
    """
    try:
        found = kind(word)
        # true is 1 for an enum
        if isinstance(word, bool) and not isinstance(found.value, bool):
            raise ValueError
        return found
    except ValueError:
        # YAML reads a bare `none` as text but `null` and an empty value as nothing.
        allowed = [_json(option.value).strip('"') for option in kind]
        raise unknown(what, word, allowed) from None


def _json(value: object) -> str:
    """As JSON; a value that JSON cannot hold by its type alone, as it may be large."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
