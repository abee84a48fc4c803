"""The decode step inside the token loop as a program of its own: tests look at its logits."""

import functools

import jax
import numpy as np

from ladder_jax.config import Execution, Launch, Loop, Quantize
from ladder_jax.decode import prefill, steps, weights
from ladder_jax.parallel import on_mesh, over_ranks
from tests import cases


@functools.cache
def decode(definition, *, loop=Loop.UNROLLED, launch=Launch.AUTO, quantize=Quantize.NONE):
    """A compiled (params, caches, tokens [B], lengths [B]) -> (logits [B, V], caches). The caches
    stay.
    """
    dims = steps.cache_dims(definition, loop=loop)
    in_dims = (weights.dims(definition, loop=loop, quantize=quantize), dims, "B", "B")
    execution = Execution(loop=loop, launch=steps._launch(definition, launch))
    step = steps.step(definition, execution=execution)
    ranked = over_ranks(step, layout=definition.layout, in_dims=in_dims, out_dims=("BV", dims))
    return jax.jit(
        on_mesh(ranked, layout=definition.layout, in_dims=in_dims, out_dims=("BV", dims))
    )


def check_prefill_and_decode(definition, stored, tokens, lengths, full, *, new, limit, **form):
    """Prompts of these lengths, with rubbish beyond their ends, and `new` decode steps after them:
    the logits are those of the `full` pass [B, T, V].
    """
    rows, longest = np.arange(len(tokens)), max(lengths)
    prompts = np.where(np.arange(longest) < lengths[:, None], tokens[:, :longest], 99)
    logits, caches = prefill(definition, capacity=32, **form)(stored, prompts, lengths)
    found, step = [logits], decode(definition, **form)
    for length in (lengths + n for n in range(new)):
        logits, caches = step(stored, caches, tokens[rows, length], length)
        found.append(logits)
    for more, logits in enumerate(found):
        real = np.asarray(logits)[:, : definition.config.vocab_size]
        assert cases.error(real, full[rows, lengths + more - 1]) < limit
