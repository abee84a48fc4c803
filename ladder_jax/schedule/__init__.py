"""Ahead-of-time compilation for hardware that is not here."""

from ladder_jax.schedule.targets import TARGETS as TARGETS
from ladder_jax.schedule.targets import Target as Target
