"""The numbers of devices that a model can be split over, for the command line."""

from ladder_jax.config import MeshConfig, ModelConfig, check_fits_mesh
from ladder_jax.config.fields import check, passes
from ladder_jax.errors import UserError


def check_tensor(model: ModelConfig, *, name: str, tensor: int, devices: int, where: str) -> None:
    """Raises UserError if `where` has fewer devices, or if the model, `name` to the user, cannot be
    split over them.
    """
    allowed = f"allowed for {name}: {', '.join(map(str, divisors(model, most=devices)))}"
    check(
        tensor <= devices,
        f"--tensor {tensor} is more than the {devices} devices of {where} ({allowed})",
    )
    check_divides(model, tensor=tensor, most=devices)


def check_divides(model: ModelConfig, *, tensor: int, most: int, option: str = "tensor") -> None:
    """Raises UserError if the model cannot be split over `tensor` devices. It lists the valid
    numbers up to `most`.

    option: the command line's option for the number.
    """
    try:
        check_fits_mesh(model, MeshConfig(tensor=tensor))
    except UserError as error:
        allowed = divisors(model, most=most)
        nearest = min(allowed, key=lambda size: abs(size - tensor))
        names = ", ".join(map(str, allowed))
        raise UserError(
            f"--{option} {tensor}: {error}; did you mean {nearest}? (allowed: {names})"
        ) from None


def divisors(model: ModelConfig, *, most: int) -> list[int]:
    """The numbers of devices, up to `most`, that the model can be split over."""
    return [
        tensor
        for tensor in range(1, most + 1)
        if passes(check_fits_mesh, model, MeshConfig(tensor=tensor))
    ]
