"""Collective matmuls: the gather before a matmul, or the scatter after it, as a ring of permutes
under its own chunks.

Rank r holds chunk r of the positions of [B, T, D], as [B, T/ranks, D]. While one chunk is
multiplied, the next one travels:

    gather_product    in flight   x of the ranks r - k, r + k            beside   products of chunks r -+ (k - 1)
    scatter_product   in flight   sums for the ranks r + k, r - k        beside   partials of chunks r +- (k - 1)

Both directions of the ring are used at once, so n ranks take n // 2 rounds; of an even n, the round
that is furthest from r has one direction. Barriers keep the order, without which compilers merge
the chunks' matmuls or bunch them. A gather's ends each round. A scatter's ties each chunk's
position, a scalar, to the sums that were made before: so one direction's matmul runs beside the
other direction's permute, and XLA can fuse it with the addition of what arrived.

The transpose of either is the other, so the backward pass is rings too: of a gathered product the
gradient of x is a scattered one, and of a scattered product a gathered one. A weight's gradient, a
sum over all positions, is one matmul over chunks that were gathered by a ring beside the other
gradient's matmuls; it is added as the product itself does it (in float32, see nn/quantized.py). Of
x only this rank's positions are kept, and gathered again.

A *product* is a function (x [B, T, ...], weights) -> arrays [B, T, ...] that treats every position
alike and is affine in x; `weights` is any pytree. Several matrices in one product share the ring
that brings their input.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ladder_jax.parallel.collectives import Axes, permute, pvary, rank, ranks, varying
from ladder_jax.scopes import RING_GATHER, RING_SCATTER

LENGTH = 1  # the dimension of positions

Product = Callable[[Array, Any], Any]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def gather_product(product: Product, x: Array, weights: Any, axes: Axes) -> Any:
    """`product` of all ranks' positions: x [B, T/ranks, ...] to arrays [B, T, ...]."""
    return _gathered(lambda chunk: product(chunk, weights), x, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def scatter_product(product: Product, x: Array, weights: Any, axes: Axes) -> Array:
    """This rank's positions of the sum of every rank's `product`: x [B, T, ...] to
    [B, T/ranks, ...].
    """
    return _scattered(lambda owner: product(_chunk(x, owner, axes), weights), axes)


def _gather_backward(product, axes, kept, gradients):
    x, weights = kept
    of_x = _of_input(product, x, weights)
    gradient = _scattered(lambda owner: of_x(_chunk(gradients, owner, axes)), axes)
    whole = _gathered(lambda chunk: chunk, x, axes)
    with jax.named_scope(RING_GATHER):
        return gradient, _of_weights(product, whole, weights)(gradients)


def _scatter_backward(product, axes, kept, gradient):
    x, weights = kept
    of_x = _of_input(product, _chunk(x, 0, axes), weights)
    of_input, whole = _gathered(lambda chunk: (of_x(chunk), chunk), gradient, axes)
    with jax.named_scope(RING_GATHER):
        return of_input, _of_weights(product, x, weights)(whole)


def _keep(product, x, weights, axes, *, forward):
    return forward(product, x, weights, axes), (x, weights)


gather_product.defvjp(functools.partial(_keep, forward=gather_product), _gather_backward)
scatter_product.defvjp(functools.partial(_keep, forward=scatter_product), _scatter_backward)


def _of_input(product, x, weights):
    """The gradient of an input like `x` from that of its product, in which its values have no
    part.
    """
    _, pull_back = jax.vjp(lambda x: product(x, weights), jnp.zeros_like(x))
    return lambda gradients: pull_back(gradients)[0]


def _of_weights(product, x, weights):
    _, pull_back = jax.vjp(lambda weights: product(x, weights), weights)
    return lambda gradients: pull_back(gradients)[0]


@jax.named_scope(RING_GATHER)
def _gathered(visit, x, axes):
    """`visit` of every rank's chunk, its arrays [B, T/ranks, ...] joined to [B, T, ...]."""
    count = ranks(axes)
    here = rank(axes)
    whole, arrived = None, {0: x}  # by the distance of the rank that the chunk came from
    for distance in range(1, count // 2 + 2):  # of the ranks whose chunks travel
        moving = {}
        if distance <= count // 2:
            moving[-distance] = permute(arrived[1 - distance], axes, step=1)
        if distance <= (count - 1) // 2:
            moving[distance] = permute(arrived[distance - 1], axes, step=-1)
        for origin, chunk in arrived.items():
            whole = _write(whole, visit(chunk), here + origin, axes)
        whole, arrived = lax.optimization_barrier((whole, moving)) if moving else (whole, {})
    return whole


@jax.named_scope(RING_SCATTER)
def _scattered(partial_of, axes):
    """The sum of every rank's `partial_of` this rank's chunk, [B, T/ranks, ...]."""
    count = ranks(axes)
    here = rank(axes)
    owners = []  # the furthest first, by their distance: in both directions in turn
    for far in range(count // 2, 0, -1):
        owners.append(far)
        back = far if count % 2 else far - 1
        if back:
            owners.append(-back)
    arriving, sent = {}, None  # by direction; (the direction, the newest sums)
    for distance in owners:
        step = 1 if distance > 0 else -1
        owner = here + distance
        if sent is not None:
            arriving[sent[0]], owner = _send(*sent, owner, axes)
        partial = partial_of(owner)
        sent = step, partial + arriving.pop(step) if step in arriving else partial
    if sent is None:
        return partial_of(here)
    last, owner = _send(*sent, here, axes)
    own = sum(arriving.values(), partial_of(owner))
    own, last = lax.optimization_barrier((own, last))
    return own + last


def _send(step, sums, owner, axes):
    """What arrives from the rank before, and `owner`, which depends on `sums`."""
    sums, owner = lax.optimization_barrier((sums, owner))
    return permute(sums, axes, step=step), owner


def _write(whole, chunks, owner, axes):
    """`whole` with the arrays of `chunks` at the owner's positions; None is nothing written yet."""

    def write(chunk: Array, into: Array | None) -> Array:
        rows, length, *rest = chunk.shape
        if into is None:
            into = pvary(
                lax.empty((rows, length * ranks(axes), *rest), chunk.dtype), varying(chunk)
            )
        return lax.dynamic_update_slice_in_dim(into, chunk, owner % ranks(axes) * length, LENGTH)

    return (
        jax.tree.map(write, chunks, whole)
        if whole is not None
        else jax.tree.map(lambda a: write(a, None), chunks)
    )


def _chunk(arrays, owner, axes):
    """The owner's positions of every array [B, T, ...]."""

    def read(a: Array) -> Array:
        length = a.shape[LENGTH] // ranks(axes)
        return lax.dynamic_slice_in_dim(a, owner % ranks(axes) * length, length, LENGTH)

    return jax.tree.map(read, arrays)
