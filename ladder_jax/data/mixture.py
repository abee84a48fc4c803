"""YAML files that list token stores, which are mixed by weight.

mixture:
  web: 7      # a store's folder, relative to this file, or gs://bucket/folder
  code: 3     # 3 of 10 rows, regardless of the stores' sizes, to within 1 %
"""

import math
import pathlib

from ladder_jax.config.load import read_section
from ladder_jax.errors import UserError
from ladder_jax.files import AnyPath, absolute, is_remote

ENDINGS = (".yaml", ".yml")


def read_mixture(file: pathlib.Path) -> list[tuple[AnyPath, float]]:
    """The stores in a mixture file, and their weights, above 0. Raises UserError if it is not
    one.
    """
    weights = read_section(file, "mixture", what="the mixture")
    if not isinstance(weights, dict) or not weights:
        raise UserError(
            f"{str(file)!r} must hold one section 'mixture:' with token stores and weights, such as 'web: 7'"
        )
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise UserError(
                f"{str(file)!r}: the weight of {str(name)!r} must be a number above 0, not {weight!r}"
            )
    folder = lambda name: absolute(name) if is_remote(name) else file.parent / name
    return [(folder(str(name)), float(weight)) for name, weight in weights.items()]
