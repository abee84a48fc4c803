"""The numbers of devices that a model can be split over, for the command line."""

from ladder_jax.config import MeshConfig, ModelConfig, check_fits_mesh
from ladder_jax.errors import UserError


def check_divides(model: ModelConfig, *, tensor: int, most: int, option: str = "tensor") -> None:
    """Raises UserError if the model cannot be split over `tensor` devices. It lists the valid numbers up to `most`.

    option: the command line's option for the number.
    """
    try:
        check_fits_mesh(model, MeshConfig(tensor=tensor))
    except UserError as error:
        allowed = divisors(model, most=most)
        nearest = min(allowed, key=lambda size: abs(size - tensor))
        names = ", ".join(map(str, allowed))
        raise UserError(f"--{option} {tensor}: {error}; did you mean {nearest}? (allowed: {names})") from None


def divisors(model: ModelConfig, *, most: int) -> list[int]:
    """The numbers of devices, up to `most`, that the model can be split over."""
    sizes = []
    for tensor in range(1, most + 1):
        try:
            check_fits_mesh(model, MeshConfig(tensor=tensor))
            sizes.append(tensor)
        except UserError:
            pass
    return sizes
