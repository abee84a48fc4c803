"""Rows of tokens for the experts of all ranks, and back: buffers of a fixed size, and one
all-to-all each way.

An expert's buffer has S slots for the rows of one rank's tokens. They are taken in the order of the
tokens, batch row after batch row; a row that finds no slot is dropped. So no token depends on a
later one of its sequence.

    fill       a rank's tokens [N, D] into the buffers of all experts, [E, S, D]
    dispatch   the buffers to the ranks of their experts, [E/ranks, ranks S, D]
    combine    what the experts make of them, [ranks S, E/ranks, D], back to the ranks of the tokens
    collect    each token's rows, weighted and added in float32, [N, D]

Letters: N tokens of this rank, K choices of one, E all experts, padding included, S slots. Not all
slots are in use; the others hold zeros.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from ladder_jax.errors import UserError
from ladder_jax.parallel.collectives import Axes, pvary


def by_expert(choice_R: Array, *, experts: int) -> tuple[Array, Array, Array]:
    """(order, place, sizes): the row in each place, sorted by expert; each row's place; how many
    rows an expert has.
    """
    order = jnp.argsort(choice_R, stable=True)
    place = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
    )
    sizes = jnp.sum(choice_R[:, None] == jnp.arange(experts)[None, :], axis=0, dtype=jnp.int32)
    return order, place, sizes


def slots(choice_NK: Array, *, experts: int, size: int) -> Array:
    """int32 [N, K]: the slot of each row among all experts' slots, expert x S + place; E S for a
    dropped one.

    A row whose choice is E is of no expert, and takes no slot.
    """
    flat = choice_NK.reshape(-1)
    _, place, counts = by_expert(flat, experts=experts)
    within = place - jnp.take(jnp.cumsum(counts) - counts, flat, mode="clip")
    has_slot = (within < size) & (flat < experts)
    return jnp.where(has_slot, flat * size + within, experts * size).reshape(choice_NK.shape)


def fill(x_ND: Array, slots_NK: Array, *, experts: int, size: int) -> Array:
    """[E, S, D]: the buffers of all experts, with the rows of this rank's tokens."""
    return _into_slots(x_ND, slots_NK.astype(jnp.int32), experts * size).reshape(experts, size, -1)


def dispatch(buffers_ESD: Array, *, axes: Axes) -> Array:
    """[E/ranks, ranks S, D]: all ranks' buffers of this rank's experts."""
    return lax.all_to_all(pvary(buffers_ESD, axes), axes, split_axis=0, concat_axis=1, tiled=True)


def places(slots_NK: Array, *, experts: int, size: int, count: int) -> Array:
    """Float32 [N, K]: where `combine` brings the output of each row, on one of `count` ranks; of a
    dropped one E S.

    Exact as float32, because a state that is differentiated carries no integers. Raises UserError
    for too many rows.
    """
    if experts * size >= 2**24:
        raise UserError(
            f"{experts * size:,} rows of experts on one rank are too many: fewer tokens, or a lower capacity"
        )
    own = experts // count
    expert, slot = jnp.divmod(slots_NK, size)
    return ((expert // own * size + slot) * own + expert % own).astype(jnp.float32)


def combine(rows_RED: Array, *, axes: Axes) -> Array:
    """[ranks S, E/ranks, D], of other experts: the outputs of the rows of this rank's tokens."""
    return lax.all_to_all(rows_RED, axes, split_axis=0, concat_axis=0, tiled=True)


def collect(rows_RED: Array, places_NK: Array, weights_NK: Array) -> Array:
    """[N, D] in the rows' dtype: the sum of each token's rows times float32 `weights`; dropped ones
    are zero.
    """
    rows_SD = rows_RED.reshape(-1, rows_RED.shape[2])
    rows = _from_slots(rows_SD, places_NK.astype(jnp.int32)).reshape(*places_NK.shape, -1)
    weights = jnp.where(places_NK < len(rows_SD), weights_NK, 0)
    return jnp.sum(rows.astype(jnp.float32) * weights[:, :, None], axis=1).astype(rows.dtype)


def _sources(slots_NK, total):
    """int32 [E S]: the row, n K + k, in each slot; N K in a free one."""
    count = slots_NK.size
    free = jnp.full_like(slots_NK, count, shape=(total,))
    return free.at[slots_NK.reshape(-1)].set(jnp.arange(count, dtype=jnp.int32), mode="drop")


def _rows(rows_RD, places):
    """`rows_RD` at `places`; zeros at places beyond them."""
    return jnp.take(rows_RD, places, axis=0, mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _into_slots(x_ND, slots_NK, total):
    """[E S, D]: each slot's token. Backward a token's rows are added in float32."""
    return _rows(x_ND, _sources(slots_NK, total) // slots_NK.shape[1])


def _into_slots_backward(total, slots_NK, gradient):
    rows = _rows(gradient, slots_NK.reshape(-1)).reshape(*slots_NK.shape, -1)
    return jnp.sum(rows, axis=1, dtype=jnp.float32).astype(gradient.dtype), None


_into_slots.defvjp(
    lambda x, slots, total: (_into_slots.__wrapped__(x, slots, total), slots), _into_slots_backward
)


@jax.custom_vjp
def _from_slots(rows_SD, slots_NK):
    """[N K, D]: each row from its slot; zeros for a dropped one."""
    return _rows(rows_SD, slots_NK.reshape(-1))


def _from_slots_backward(residuals, gradient):
    slots_NK, total = residuals
    return _rows(gradient, _sources(slots_NK, total)), None


_from_slots.defvjp(
    lambda rows, slots: (_from_slots.__wrapped__(rows, slots), (slots, len(rows))),
    _from_slots_backward,
)
