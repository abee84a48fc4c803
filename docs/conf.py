"""The site: `make docs`, or `sphinx-build -W docs build/docs`."""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import docstrings

import ladder_jax

EXPERIMENTS = pathlib.Path(__file__).parent.parent / "experiments"

project = "ladder_jax"
author = "The ladder_jax authors"
release = version = ladder_jax.__version__
copyright = author  # noqa: A001

extensions = ["sphinx.ext.autodoc", "myst_nb"]
# `experiments` is a link to the folder beside this one, so that its pages and notebooks are the
# site's too.
exclude_patterns = [
    "experiments/README.md",
    "experiments/notebooks/README.md",
    "experiments/launch/*/**",
]

nb_execution_mode = "off"  # experiments/notebooks stores its outputs, and runs them itself
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"ladder_jax {release}"


def source_read(app, docname, source):
    """Links to the READMEs of `experiments`, or to its folders, become links to their pages here.

    By name: a path would be followed through the link to the folder beside this one, where no page
    is. A heading (`#...`) is dropped, as a link by name leads to a page.
    """
    if docname.startswith("experiments/notebooks/"):
        return
    here = pathlib.Path(app.srcdir, docname).parent.resolve()
    source[0] = re.sub(
        r"\[([^\]`]+)\]\(([\w./-]+)(?:#[\w-]+)?\)", lambda match: _to_page(here, match), source[0]
    )


def _to_page(here, match):
    label, target = match.groups()
    path = (here / target).resolve()
    folder = path.parent if path.name == "README.md" else path
    if folder.parent != EXPERIMENTS or not folder.is_dir():
        return match[0] if not folder.is_dir() else label
    return f"{{doc}}`{label} </experiments/{folder.name}/README>`"


def setup(app):
    app.connect("source-read", source_read)
    app.connect("autodoc-process-docstring", docstrings.process)
