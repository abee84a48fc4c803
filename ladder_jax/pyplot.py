"""matplotlib, which only pictures need: an extra."""

import importlib.util
from types import ModuleType

from ladder_jax.errors import UserError


def installed() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_installed(what: str) -> None:
    """Raises UserError where matplotlib is missing; `what` needs it (`--plot FILE`, say)."""
    if not installed():
        raise UserError(f"{what}: a picture needs matplotlib: pip install 'ladder-jax[plot]'")


def load() -> ModuleType:
    """`matplotlib.pyplot`, for files and not for a screen. Raises UserError where it is not installed."""
    check_installed("matplotlib.pyplot")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
