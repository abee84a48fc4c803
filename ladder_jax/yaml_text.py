"""Read YAML. Any text gives a value of bounded size, or a UserError of one line."""

from typing import Any

from ladder_jax.errors import UserError

MAX_VALUES = 100_000
"""Of one text. A few aliases of aliases can stand for billions of values, which an error message would write out."""


def load(text: str, *, what: str) -> Any:
    """The value of a YAML text. Raises UserError "`what` is not YAML: ..."."""
    import yaml

    try:
        value = yaml.safe_load(text)
        count = _count(value, {})
    except Exception as error:  # PyYAML raises errors of many kinds for dates, numbers and tags
        raise UserError(f"{what} is not YAML: {' '.join(str(error).split())[:300] or type(error).__name__}") from None
    if count > MAX_VALUES:
        raise UserError(f"{what} is not YAML of ours: it has more than {MAX_VALUES:,} values")
    return value


def _count(value: Any, counts: dict[int, float]) -> float:
    """The number of values, each alias counted in full. A list that contains itself has infinitely many."""
    if not isinstance(value, dict | list | set | tuple):
        return 1
    if id(value) not in counts:
        counts[id(value)] = float("inf")
        below = [*value, *value.values()] if isinstance(value, dict) else value
        counts[id(value)] = 1 + sum(_count(one, counts) for one in below)
    return counts[id(value)]
