"""The schedule of a gradual conversion: each layer's ladder fraction, 0 (standard) to 1 (ladder), by the step."""

import jax
import jax.numpy as jnp
import numpy as np

from ladder_jax.config import ConversionConfig, Pace
from ladder_jax.errors import UserError
from ladder_jax.residual import Topology

LADDER_FRACTION = "ladder_fraction"
"""The name, among what a step computes of its number, of each layer's [L] (see residual/wires/annealed.py)."""


def ladder_fraction(step: jax.Array, *, topology: Topology, config: ConversionConfig) -> jax.Array:
    """Float32 [L] for step number `step`, counted from 0.

    The ladder layers are divided into groups, the topmost first, each with an equal share of the steps. During its
    share a group ramps from 0 to 1, or jumps to 1 at the beginning. Layers of a hybrid that stay standard have 1: their
    input is the same either way. Raises UserError where no layer is a ladder layer, and for more groups than these.
    """
    ladder = [n for n, steps in enumerate(topology.layers) if any(step.delay for step in steps)]
    if not ladder:
        raise UserError(f"conversion.steps={config.steps} has no ladder layer to turn: all are standard")
    config.check_groups(len(ladder))
    group = np.full(topology.num_layers, -1)
    for index, members in enumerate(np.array_split(ladder[::-1], config.groups)):
        group[members] = index
    span = config.steps / config.groups
    done = (step.astype(jnp.float32) - jnp.asarray(group * span, jnp.float32)) / span
    fraction = jnp.clip(done, 0, 1) if config.pace is Pace.RAMP else (done >= 0).astype(jnp.float32)
    return jnp.where(jnp.asarray(group) < 0, 1.0, fraction)
