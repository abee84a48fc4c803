"""The decode step inside the token loop as a program of its own: tests look at its logits.

It needs the package alone, as `experiments.one_gpu` has no more.
"""

import functools

import jax

from ladder_jax.config import Launch, Loop, Quantize
from ladder_jax.decode import steps, weights
from ladder_jax.parallel import on_mesh, over_ranks


@functools.cache
def decode(definition, *, loop=Loop.UNROLLED, launch=Launch.AUTO, quantize=Quantize.NONE):
    """A compiled (params, caches, tokens [B], lengths [B]) -> (logits [B, V], caches). The caches
    stay.
    """
    dims = steps.cache_dims(definition, loop=loop)
    in_dims = (weights.dims(definition, loop=loop, quantize=quantize), dims, "B", "B")
    execution = steps._execution(definition, loop=loop, launch=launch)
    one = steps.step(definition, execution=execution)

    def step(params, *rest):
        return one(weights.by_layer(definition, params, loop=loop), *rest)

    ranked = over_ranks(step, layout=definition.layout, in_dims=in_dims, out_dims=("BV", dims))
    return jax.jit(
        on_mesh(ranked, layout=definition.layout, in_dims=in_dims, out_dims=("BV", dims))
    )
