"""Over how many devices a preset can be split, for the command line."""

from ladder_jax.config import MeshConfig, check_fits_mesh, preset
from ladder_jax.errors import UserError


def check_divides(model: str, *, tensor: int, most: int, option: str = "tensor") -> None:
    """Raises UserError where the preset cannot be split over `tensor` devices; it names those up to `most` that can.

    option: what the user wrote the number after.
    """
    try:
        check_fits_mesh(preset(model), MeshConfig(tensor=tensor))
    except UserError as error:
        allowed = divisors(model, most=most)
        nearest = min(allowed, key=lambda size: abs(size - tensor))
        names = ", ".join(map(str, allowed))
        raise UserError(f"--{option} {tensor}: {error}; did you mean {nearest}? (allowed: {names})") from None


def divisors(model: str, *, most: int) -> list[int]:
    """The numbers of devices, up to `most`, over which the preset can be split."""
    found = []
    for tensor in range(1, most + 1):
        try:
            check_fits_mesh(preset(model), MeshConfig(tensor=tensor))
            found.append(tensor)
        except UserError:
            pass
    return found
