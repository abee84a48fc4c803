"""All-reduces with an explicit start and done, an optional path for decoding.

jax 0.12's `psum_start` is not public, has no gradient and needs `check_vma=True`. It is never the default, and only
this file uses it, behind `check`. It lets NVIDIA GPUs overlap the fast kernel for small all-reduces, too, which the
compiler's own scheduler never does.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from ladder_jax.errors import UserError


def check(mesh: Mesh) -> None:
    """Raises UserError where explicit collectives are not supported: XLA aborts on them for a CPU."""
    device = mesh.devices.flat[0]
    if device.platform not in ("gpu", "cuda"):
        raise UserError(f"launch 'explicit' is for NVIDIA GPUs, and this mesh is of {device.platform}: use 'chained'")
    if _parts() is None:
        raise UserError(f"launch 'explicit' needs a jax with started collectives, and {jax.__version__} has none")


def start(x: jax.Array, axes: tuple[str, ...]) -> Any:
    """Begin the sum over `axes`; its `.done()` is the sum. Inside `ordered` only."""
    psum_start, _ = _parts()
    return psum_start(x, axes)


def ordered(fn: Callable) -> Callable:
    """`fn`, its operations compiled in the order in which it is written."""
    _, program_order = _parts()
    return program_order(fn, enforce=True)


def _parts() -> tuple[Callable, Callable] | None:
    try:
        from jax._src.lax.parallel import psum_start
        from jax.experimental.overlap import program_order
    except ImportError:
        return None
    return psum_start, program_order
