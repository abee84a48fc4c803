"""A layer's experts where the tensor ranks exchange rows (residual/wires/exchange.py): buffers, not sorted rows.

All experts' buffers have one size, so their matmuls are plain batched ones, which every compiler has kernels for.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ladder_jax.nn import quantized
from ladder_jax.nn.quantized import Int8
from ladder_jax.nn.routing import Routing, measured
from ladder_jax.parallel import exchange, rank, ranks
from ladder_jax.residual.wires.exchange import ExpertParts

Norm = Callable[[jax.Array], jax.Array]  # of a normalised input: times the gain, in the compute dtype


def parts(
    moe: Any,
    norm: Norm,
    *,
    axes: tuple[str, ...],
    on_routing: Callable[[Routing], None] | None,
    ends_B: jax.Array | None = None,
) -> ExpertParts:
    """Those of an `experts.MoE`, on one rank.

    on_routing: called with its tokens' statistics. ends_B: where the rows of all ranks end; padding takes no slot.
    """

    def routed(x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        with jax.named_scope("mlp"):  # though it is part of attention's step
            x_ND = norm(x_BTD).reshape(-1, x_BTD.shape[-1])
            logits, settings = moe.logits(x_ND), dict(experts=moe.experts.count * ranks(axes))
            settings |= dict(size=moe.moe.slots(len(x_ND)))
            choice, weights = moe.route(logits)
            taken = choice
            if ends_B is not None:
                is_token = _own_positions(x_BTD, axes) < ends_B[:, None]
                taken = jnp.where(is_token.reshape(-1, 1), choice, settings["experts"])
            slots = exchange.slots(taken, **settings)
            if on_routing:
                dropped = jnp.sum(~exchange.kept(slots, **settings), dtype=jnp.float32)
                on_routing(dataclasses.replace(measured(logits, choice), dropped=dropped))
            return x_ND, slots, weights

    shared = lambda x_BTD, *tied: moe.shared(norm(x_BTD), *tied)
    return ExpertParts(routed, functools.partial(_compute, moe.experts), shared)


def _own_positions(x_BTD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[1, T/ranks]: the positions of a split stream that this rank has."""
    length = x_BTD.shape[1]
    return (rank(axes) * length + jnp.arange(length))[None, :]


def _compute(experts: Any, rows_ERD: jax.Array, tied: Callable[[Any], Any] = lambda x: x) -> jax.Array:
    """[R, E, D]: so the matmul writes what is sent in the order of sending, and no copy follows."""
    gate, up = tied(tuple(_matmul(rows_ERD, one.get_value()) for one in (experts.gate, experts.up)))
    return quantized.einsum("ERM,EMD->RED", jax.nn.silu(gate) * up, experts.down.get_value())


def _matmul(rows_ERI: jax.Array, weight_EIO: jax.Array | Int8) -> jax.Array:
    """[E, R, O]: the rows of each expert times its matrix, as `experts.grouped_matmul`."""
    if isinstance(weight_EIO, Int8):
        weight = weight_EIO.values.astype(rows_ERI.dtype)
        sums = jnp.einsum("ERI,EIO->ERO", rows_ERI, weight, preferred_element_type=jnp.float32)
        return (sums * weight_EIO.scale[:, None]).astype(rows_ERI.dtype)
    return quantized.einsum("ERI,EIO->ERO", rows_ERI, weight_EIO)
