"""The house's walls: imports point one way, as docs/inside.md draws them, without cycles; and no
file is a long one.
"""

import graphlib
import re

import pytest

from experiments.walk.__main__ import walk
from tests import changed
from tests.changed import ROOT
from tests.covering import full

LIBRARY = ROOT / "ladder_jax"
MAP = (ROOT / "docs/inside.md").read_text()
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(LIBRARY.rglob("*.py"))
}
NAMES = {path: module for module, path in MODULES.items()}


def imported(path):
    """Modules of ours that a file imports, anywhere in it."""
    return {NAMES[file] for file in changed.imports(path, late=False) if file in NAMES}


def rows():
    """The packages of the map's table, row by row."""
    table = re.findall(r"^\| (`[a-z_`, ]+`) \|", MAP, re.M)
    return [set(re.findall(r"`(\w+)`", row)) for row in table]


def package(module):
    return module.split(".")[1] if "." in module else ""


def test_every_package_is_on_the_map():
    drawn = [name for row in rows() for name in row]
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {
        path.name for path in LIBRARY.iterdir() if (path / "__init__.py").is_file()
    }


def test_packages_import_only_those_above_them():
    """Modules beside the packages, such as errors.py, are below none of them, and import no
    package.
    """
    height = {name: number for number, row in enumerate(rows()) for name in row}
    upward = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        for name in imported(path)
        if package(module) in height
        and package(name) in height
        and height[package(module)] < height[package(name)]
    ]
    assert not upward, upward


def test_packages_and_modules_import_in_no_circle():
    """`__init__` files only gather names; what a file imports by them is the package."""
    modules = {
        m: {d for d in imported(p) if MODULES[d].name != "__init__.py"} for m, p in MODULES.items()
    }
    packages = {}
    for module, path in MODULES.items():
        packages.setdefault(package(module), set()).update(map(package, imported(path)))
    for graph in (modules, {name: found - {name, ""} for name, found in packages.items() if name}):
        tuple(graphlib.TopologicalSorter(graph).static_order())  # a CycleError names the circle


def test_the_core_knows_no_side_network():
    """It is a client: what the core imports never leads to it, and no name or comment there speaks
    of it.
    """
    core = [m for m in MODULES if package(m) in ("residual", "nn", "parallel", "decode")]
    core.append("ladder_jax.train.gradients")
    reached = set(core)
    left = list(core)
    while left:
        found = imported(MODULES[left.pop()]) - reached
        reached |= found
        left.extend(found)
    assert not {m for m in reached if package(m) == "side"}
    assert "ladder_jax.side" in imported(MODULES["ladder_jax.retrain.plan"])
    named = re.compile(r"\bside\b(?! ?= ?\"right\")", re.IGNORECASE)
    assert not {m: found for m in core if (found := named.findall(MODULES[m].read_text()))}


def test_no_file_is_longer_than_500_lines():
    """One that is holds more than one concept."""
    assert not {
        module: n for module, path in MODULES.items() if (n := path.read_text().count("\n")) > 500
    }


# The one of generate trains first.
@pytest.mark.parametrize("name, most", [("train", 36), full("generate", 32)])
def test_the_walks_are_short(name, most, tmp_path):
    """`python -m experiments.walk`: a newcomer opens at most 36 files for a training step, and 32
    for one prompt.
    """
    assert 0 < len(walk(name, folder=tmp_path)) <= most
