"""YAML files that list data: a mixture of token stores by weight, or ordered stages of examples.

mixture:
  web: 7      # a store's folder, relative to this file, or gs://bucket/folder
  code: 3     # 3 of 10 rows, regardless of the stores' sizes, to within 1 %

stages:
- easy.jsonl      # a JSON lines file, or a folder of them, relative to this file
- hard.jsonl

A run trains on one stage after another, on each for a share of its steps that is the share of its rows.
"""

import math
import pathlib
from collections.abc import Sequence

from ladder_jax.config.load import read_section
from ladder_jax.errors import UserError
from ladder_jax.files import AnyPath, absolute, is_remote

ENDINGS = (".yaml", ".yml")


def read_mixture(file: pathlib.Path) -> list[tuple[AnyPath, float]]:
    """The stores in a mixture file, and their weights, above 0. Raises UserError if it is not one."""
    weights = read_section(file, "mixture", what="the mixture")
    if not isinstance(weights, dict) or not weights:
        raise UserError(
            f"{str(file)!r} must hold one section 'mixture:' with token stores and weights, such as 'web: 7'"
        )
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise UserError(f"{str(file)!r}: the weight of {str(name)!r} must be a number above 0, not {weight!r}")
    folder = lambda name: absolute(name) if is_remote(name) else file.parent / name
    return [(folder(str(name)), float(weight)) for name, weight in weights.items()]


def read_stages(file: pathlib.Path) -> list[pathlib.Path]:
    """The stages' files. Raises UserError if `file` does not list any."""
    names = read_section(file, "stages", what="the list of stages")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{str(file)!r} must hold one section 'stages:', a list of files such as '- easy.jsonl'")
    return [file.parent / pathlib.Path(name).expanduser() for name in names]


def last_steps(rows: Sequence[int], *, steps: int, path: str) -> tuple[int, ...]:
    """The last step of each stage, of `rows` rows each; every stage has at least one of all `steps`.

    Raises UserError for fewer steps than stages.
    """
    if steps < len(rows):
        raise UserError(f"data.path={path!r} has {len(rows)} stages, more than train.steps={steps}")
    last, done, total = [0], 0, sum(rows)
    for stage, count in enumerate(rows, start=1):
        done += count
        earliest = last[-1] + 1
        latest = steps - (len(rows) - stage)
        last.append(min(max(round(steps * done / total), earliest), latest))
    return tuple(last[1:])
