"""matplotlib: an optional package, as only pictures need it."""

import importlib.util
from types import ModuleType

from ladder_jax.errors import UserError


def installed() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_installed(what: str) -> None:
    """Raises UserError if matplotlib is not installed. what: the option that needs it, such as
    `--plot FILE`.
    """
    if not installed():
        raise UserError(f"{what}: a picture needs matplotlib: pip install 'ladder-jax[plot]'")


def load() -> ModuleType:
    """`matplotlib.pyplot`, set up to write files (no display). Raises UserError if it is not
    installed.
    """
    check_installed("matplotlib.pyplot")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
