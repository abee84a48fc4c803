"""The compiled program of an evaluation: how probable each next token is, and whether it is the most probable one."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax import nn
from ladder_jax.config import SCANNED, Execution, Phase
from ladder_jax.decode import sampling
from ladder_jax.nn import ModelDef
from ladder_jax.parallel import Compiled, on_mesh, over_ranks

CHUNK = 512  # positions, B x T, whose float32 logits are there at once: 0.3 GB of a vocabulary of 128k, if not split


@functools.lru_cache(maxsize=32)
def compiled_scores(definition: ModelDef, *, execution: Execution = SCANNED) -> Compiled:
    """A compiled (params, tokens [B, T], targets [B, T]) -> (log-probabilities float32, greedy bool), both [B, T].

    Entry t is that of `targets[:, t]` after `tokens[:, :t+1]`: the log-softmax of the float32 logits, in nats, and
    whether it is the first of the largest logits. No rank holds more than its share of the vocabulary, and of that
    only CHUNK positions. Compiled once for each definition and shape, so other parameters cost no compilation.
    """

    def local(params, tokens, targets):
        x, _ = nn.hidden(definition, params, tokens, execution=execution)
        return _in_chunks(functools.partial(_scores, definition, params), x, targets)

    dims = ((definition.dims, "BT", "BT"), ("BT", "BT"))
    ranked = over_ranks(local, layout=definition.layout, in_dims=dims[0], out_dims=dims[1])
    meshed = on_mesh(ranked, layout=definition.layout, in_dims=dims[0], out_dims=dims[1])
    return Compiled(meshed, mesh=definition.layout.mesh, traits=definition.traits(execution, phase=Phase.PREFILL))


def _scores(definition: ModelDef, params: nn.Params, x_BTD: jax.Array, targets_BT: jax.Array):
    axes = definition.layout.tensor
    logits = nn.logits(definition, params, x_BTD)
    best = sampling.argmax(logits.reshape(-1, logits.shape[-1]), axes=axes).reshape(targets_BT.shape)
    return -nn.cross_entropy(logits, targets_BT, axes=axes), best == targets_BT


def _in_chunks(fn, x_BTD: jax.Array, targets_BT: jax.Array):
    rows, length, width = x_BTD.shape
    size = max(1, min(length, CHUNK // rows))
    count = -(-length // size)
    if count == 1:
        return fn(x_BTD, targets_BT)
    short = count * size - length
    x = jnp.pad(x_BTD, ((0, 0), (0, short), (0, 0))).reshape(rows, count, size, width).swapaxes(0, 1)
    targets = jnp.pad(targets_BT, ((0, 0), (0, short))).reshape(rows, count, size).swapaxes(0, 1)
    whole = lambda parts: parts.swapaxes(0, 1).reshape(rows, count * size)[:, :length]
    return jax.tree.map(whole, lax.map(lambda chunk: fn(*chunk), (x, targets)))
