"""A mixture file: token stores and their weights, as YAML.

mixture:
  web: 7      # a store's folder, relative to this file, or gs://bucket/folder
  code: 3     # 3 of 10 rows, regardless of the stores' sizes
"""

import dataclasses
import math

from ladder_jax import remote, yaml_text
from ladder_jax.errors import UserError

ENDINGS = (".yaml", ".yml")


@dataclasses.dataclass(frozen=True)
class Part:
    """weight: above 0. A store's share of the rows is its weight divided by the sum of all weights, to within 1 %."""

    path: remote.Path
    weight: float


def read(file: remote.Path) -> list[Part]:
    """The stores and weights in a mixture file. Raises UserError if it is not one."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {str(file)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the mixture {str(file)!r} is not UTF-8 text") from None
    tree = yaml_text.load(text, what=f"the mixture {str(file)!r}")
    weights = tree.get("mixture") if isinstance(tree, dict) and len(tree) == 1 else None
    if not isinstance(weights, dict) or not weights:
        raise UserError(
            f"{str(file)!r} must hold one section 'mixture:' with token stores and weights, such as 'web: 7'"
        )
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise UserError(f"{str(file)!r}: the weight of {str(name)!r} must be a number above 0, not {weight!r}")
    return [Part(_folder(file, str(name)), float(weight)) for name, weight in weights.items()]


def _folder(file: remote.Path, name: str) -> remote.Path:
    return remote.path(name) if remote.is_remote(name) else file.parent / name
