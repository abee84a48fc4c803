"""Parameters split over the fsdp axis (ZeRO-3, arXiv 1910.02054) and gathered only while a layer
computes with them.

A rank holds a shard of every array along D. Matrices are gathered one layer at a time, in the
compute dtype, and again for the backward pass; each gradient is reduce-scattered in float32. Norm
gains and other vectors are so small that latency dominates: those of all layers are gathered
together.

A gather stands in the loop's body, where the compiler moves it beside the layer before
(docs/guides/overlap.md). A loop of our own that gathered one layer ahead, with barriers and a VJP,
was slower on TPUs: on v5p `ladder-jax overlap --model llama-3-70b --layers 4 --phase train
--residual ladder --fsdp 2` says 89.6 M cycles, and said 120.4 M.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ladder_jax.parallel.collectives import all_gather, reduce_scatter
from ladder_jax.parallel.mesh import ROUTER
from ladder_jax.scopes import FSDP, GATHER, SCATTER


def unshard(params: Any, dims: Any, *, dtype: jnp.dtype) -> Any:
    """The arrays of `params`, a rank's shards, gathered along D; matrices in `dtype`.

    dims: a tree of the arrays' dimensions, such as "DNH"; an array stays as it is where these have
    no D. Gradients are summed over the ranks of the axis in float32.
    """
    return jax.tree.map(
        lambda dims, a: _unsharded(a, dims, dtype) if "D" in dims else a, dims, params
    )


def in_turn(dims: Any) -> tuple[Any, Any]:
    """Of stacked layers' dimensions, what is gathered of all layers at once, the vectors ("LD"),
    and what of each.
    """
    vectors = jax.tree.map(lambda dims: dims if dims == "LD" else "", dims)
    return vectors, jax.tree.map(lambda dims: "" if dims == "LD" else dims.removeprefix("L"), dims)


def all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A checkpoint policy: everything is kept but gathered matrices, which the backward pass
    gathers again.

    A policy by names does not see through the gather's own gradient rule.
    """
    if primitive.name != "custom_vjp_call":
        return True
    return not any(
        one.primitive.name.startswith("all_gather") for one in parameters["call_jaxpr"].eqns
    )


def _unsharded(array, dims, dtype):
    # norm gains multiply in float32
    stays = len(dims.removeprefix("L")) == 1 or dims.endswith(ROUTER)
    return _gather(array, dims.index("D"), jnp.dtype(array.dtype if stays else dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(share, axis, dtype):
    with jax.named_scope(GATHER):
        return all_gather(share.astype(dtype), (FSDP,), dimension=axis)


def _give_back(gradient, axis):
    with jax.named_scope(SCATTER):
        return reduce_scatter(gradient.astype(jnp.float32), (FSDP,), dimension=axis)


_gather.defvjp(
    lambda share, axis, dtype: (_gather(share, axis, dtype), jnp.zeros((), share.dtype)),
    lambda axis, dtype, like, gradient: (_give_back(gradient, axis).astype(like.dtype),),
)
