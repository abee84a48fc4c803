"""Prefill in blocks of bounded size: scores, activations and compilations that long prompts do not outgrow."""

import functools
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ladder_jax.config import Loop, Quantize
from ladder_jax.decode import cache, steps
from ladder_jax.nn import ModelDef, Params


def prefill_in_chunks(*args: Any, **settings: Any) -> tuple[jax.Array, Any]:
    """All of `blocks` at once: (logits [B, V] after each row's last token, caches)."""
    return drained(blocks(*args, **settings))


def blocks(
    definition: ModelDef,
    params: Params,
    tokens: np.ndarray,
    lengths: np.ndarray,
    *,
    capacity: int,
    chunk: int,
    loop: Loop = Loop.UNROLLED,
    quantize: Quantize = Quantize.NONE,
) -> Generator[None, None, tuple[jax.Array, Any]]:
    """`steps.prefill` with `chunk` tokens a row at a time, one for each `next`; what it returns is the prefill's.

    tokens [B, T], lengths [B]: right-padded, on the host. Up to `chunk` tokens it is one pass; beyond, one
    program of `chunk` tokens, however many, is run as often as it takes. Between two blocks others may compute.
    """
    form, place = dict(loop=loop, quantize=quantize), definition.layout.sharding
    ends = jax.device_put(lengths, place("B"))
    if tokens.shape[1] <= chunk:
        prefill = steps.prefill(definition, capacity=capacity, **form)
        return prefill(params, jax.device_put(tokens, place("BT")), ends)
    length = max(int(lengths.max()), chunk)  # beyond it, there is but padding
    if capacity < length:  # jax would write the last block over the one before
        raise ValueError(f"a cache of {capacity} positions has no room for {length} tokens")
    extend = steps.extend(definition, **form)
    caches = cache.make(definition, rows=len(tokens), capacity=capacity, loop=loop)()
    logits = None
    for start in starts(length, chunk=chunk):
        if logits is not None:
            yield
        block = tokens[:, start : start + chunk]
        new, caches = extend(params, caches, jax.device_put(block, place("BT")), np.int32(start), ends)
        # A row keeps the logits of the last block that begins before its end: that one holds its end.
        logits = new if logits is None else _newer(new, logits, lengths > start)
    return logits, caches


def drained[T](generator: Generator[None, None, T]) -> T:
    """What it returns, all of it done."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


def starts(length: int, *, chunk: int) -> list[int]:
    """Where the blocks begin. The last ends where the tokens do, and writes some positions a second time, with the
    same values: padding it would take as long, and room in the cache."""
    return [min(start, length - chunk) for start in range(0, length, chunk)]


@functools.partial(jax.jit, donate_argnums=1)
def _newer(new_BV: jax.Array, old_BV: jax.Array, newer_B: jax.Array) -> jax.Array:
    return jnp.where(newer_B[:, None], new_BV, old_BV)
