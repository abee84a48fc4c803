"""A mixture file: token stores and their weights, as YAML.

mixture:
  web: 7      # a store's folder, relative to this file, or gs://bucket/folder
  code: 3     # 3 of 10 rows, regardless of the stores' sizes
"""

import dataclasses
import math

from ladder_jax.config.load import read_section
from ladder_jax.errors import UserError
from ladder_jax.files import AnyPath, absolute, is_remote

ENDINGS = (".yaml", ".yml")


@dataclasses.dataclass(frozen=True)
class Part:
    """weight: above 0. A store's share of the rows is its weight divided by the sum of all weights, to within 1 %."""

    path: AnyPath
    weight: float


def read(file: AnyPath) -> list[Part]:
    """The stores and weights in a mixture file. Raises UserError if it is not one."""
    weights = read_section(file, "mixture", what="the mixture")
    if not isinstance(weights, dict) or not weights:
        raise UserError(
            f"{str(file)!r} must hold one section 'mixture:' with token stores and weights, such as 'web: 7'"
        )
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise UserError(f"{str(file)!r}: the weight of {str(name)!r} must be a number above 0, not {weight!r}")
    return [Part(_folder(file, str(name)), float(weight)) for name, weight in weights.items()]


def _folder(file: AnyPath, name: str) -> AnyPath:
    return absolute(name) if is_remote(name) else file.parent / name
