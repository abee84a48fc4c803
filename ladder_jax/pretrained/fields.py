"""Settings of another program's file, with their types checked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ladder_jax.errors import UserError, described


@dataclasses.dataclass(frozen=True)
class Fields:
    """values: the settings by name; None is a missing one. where: the file, for messages."""

    values: Mapping[str, Any]
    where: str

    def __call__(self, name: str, kind: Any, default: Any = ...) -> Any:
        """kind: a type, or a union of types. Raises UserError for another type, and for a missing
        setting without a default.
        """
        value = self.values.get(name)
        if value is None:
            if default is ...:
                raise UserError(f"{self.where} has no {name}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = getattr(kind, "__name__", kind)
            raise UserError(
                f"{self.where}: {name} must be of type {wanted}, not {described(value)}"
            )
        return value
