"""The schedule of a gradual conversion: each layer's ladder fraction, 0 (standard) to 1 (ladder), by the step."""

import jax
import jax.numpy as jnp
import numpy as np

from ladder_jax.config import ConversionConfig, Pace
from ladder_jax.errors import UserError
from ladder_jax.residual import Topology


def ladder_fraction(step: jax.Array, *, topology: Topology, config: ConversionConfig) -> jax.Array:
    """Float32 [L] for the step that comes after `step` others.

    The ladder's layers are cut into groups, the topmost first, each with an equal share of the steps: in its share a
    group ramps from 0 to 1, or jumps to 1 as it begins. Layers that are standard anyway stand at 1. Raises UserError
    where all are.
    """
    ladder = [n for n, steps in enumerate(topology.layers) if any(step.delay for step in steps)]
    if not ladder:
        raise UserError(f"conversion.steps={config.steps} has no ladder layer to turn: all are standard")
    group = np.full(topology.num_layers, -1)
    for index, members in enumerate(np.array_split(ladder[::-1], min(config.groups, len(ladder)))):
        group[members] = index
    span = config.steps / config.groups
    done = (step.astype(jnp.float32) - jnp.asarray(group * span, jnp.float32)) / span
    turned = jnp.clip(done, 0, 1) if config.pace is Pace.RAMP else (done >= 0).astype(jnp.float32)
    return jnp.where(jnp.asarray(group) < 0, 1.0, turned)
