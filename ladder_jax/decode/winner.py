"""The largest score over a vocabulary that is split over ranks: one small collective, whatever is asked about it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax.parallel import all_ranks, rank
from ladder_jax.parallel.collectives import CHOICE


def argmax(scores_BV: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """The first index of each row's largest score over all ranks, [B] int32. `scores_BV` is this rank's share."""
    return winner(scores_BV, [], axes=axes)[0]


@jax.named_scope(CHOICE)
def winner(
    scores_BV: jax.Array, beside: Sequence[jax.Array], *, axes: tuple[str, ...]
) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """`argmax`; what each rank sends `beside` its largest score, [B] float32 each, from all ranks: [ranks, B] each;
    and which rank has the largest, [B].

    One all-gather of integers carries it all: so few bytes take no time beside the wait.
    """
    token = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32) + rank(axes) * scores_BV.shape[-1]
    sent = [token, *(lax.bitcast_convert_type(x, jnp.int32) for x in (jnp.max(scores_BV, axis=-1), *beside))]
    tokens, *rest = jnp.moveaxis(all_ranks(jnp.stack(sent), axes), 1, 0)
    best, *others = (lax.bitcast_convert_type(x, jnp.float32) for x in rest)
    first = jnp.argmax(best, axis=0)  # of equals the first, which has the lower tokens
    return of_rank(tokens, first), others, first


def of_rank(x_RB: jax.Array, rank_B: jax.Array) -> jax.Array:
    """For each row the entry of one rank, [B]."""
    return jnp.take_along_axis(x_RB, rank_B[None], axis=0)[0]
