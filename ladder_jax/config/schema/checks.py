"""What every section is checked with. A condition that fails is the user's one line."""

from ladder_jax.errors import UserError


def check(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def check_positive(config: object, section: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(value > 0, f"{section}.{name} must be positive, not {value}")
