"""AdamW as the paper trains (arXiv 2501.06589, section 4.1): clipping, decoupled decay, warm-up and cosine."""

import jax
import jax.numpy as jnp
import optax

from ladder_jax.config import TrainConfig
from ladder_jax.nn import Params
from ladder_jax.nn.parameter import is_matrix
from ladder_jax.parallel.collectives import GRADIENT_NORM


def schedule(config: TrainConfig) -> optax.Schedule:
    """Linear from 0 to the peak, then a cosine to a fraction of it. A run shorter than its warm-up only warms up."""
    warmup = min(config.warmup_steps, config.steps)
    cosine = optax.cosine_decay_schedule(
        config.learning_rate, max(config.steps - warmup, 1), alpha=config.final_learning_rate_fraction
    )
    if warmup == 0:
        return cosine
    # Step 0 already moves: (step + 1) / warmup of the peak.
    linear = optax.linear_schedule(config.learning_rate / warmup, config.learning_rate, max(warmup - 1, 1))
    return optax.join_schedules([linear, cosine], [warmup])


def adamw(config: TrainConfig, *, dims: Params) -> optax.GradientTransformation:
    """The update before the learning rate, of parameters with these dimensions.

    It sees global arrays, so its norm is that of all shards.
    """
    clip = optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(
        clip._replace(update=jax.named_scope(GRADIENT_NORM)(clip.update)),
        optax.scale_by_adam(config.beta1, config.beta2, config.eps, mu_dtype=jnp.float32),
        # Norm gains and biases are not decayed: only what is multiplied with activations.
        optax.add_decayed_weights(config.weight_decay, mask=jax.tree.map(is_matrix, dims)),
    )


@jax.named_scope(GRADIENT_NORM)
def norm(gradients: Params) -> jax.Array:
    """The root of the sum of all squares, [] float32; of global arrays, so that of all shards."""
    return optax.tree.norm(gradients)


def to_dict(state: optax.OptState) -> Params:
    """The optimizer's state as a plain nested dict, for checkpoints."""
    return {name: optax.tree.get(state, name) for name in ("count", "mu", "nu")}


def from_dict(tree: Params, *, like: optax.OptState) -> optax.OptState:
    return optax.tree.set(like, **tree)
