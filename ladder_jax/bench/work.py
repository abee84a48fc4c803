"""The minimum traffic and compute of one device: the numerators of the shares of copy bandwidth and
matmul rate.

Counted from the kernels of the speed model, `predict.work`: a key/value head that several devices
share counts on each of them, and the vocabulary's padding counts too. Biases and norms of queries
and keys do not.
"""

import itertools

from ladder_jax.predict.program import steps_of
from ladder_jax.predict.work import Block, Kernel, Model


def decode_bytes(model: Model, *, rows: int, prompt_length: int, new_tokens: int) -> float:
    """Bytes that a device must read and write in a decode step, as a mean over a generation's
    steps: the weights, of experts those that the rows choose if all are evenly loaded; the tokens'
    rows of the embedding table; and the filled part of the cache. Activations and logits do not
    count.
    """
    block = model.decode_step(rows=rows, prompt_length=prompt_length, new_tokens=new_tokens)
    return sum(kernel.weights + kernel.cache for kernel in _kernels(model, block))


def prefill_flops(model: Model, *, rows: int, prompt_length: int) -> int:
    """Floating-point operations of a device's matmuls in a prefill, two per multiply-add. Logits
    are of each row's last position. The masked half of attention does not count, even if a kernel
    computes it.
    """
    block = model.prefill(rows=rows, prompt_length=prompt_length)
    return round(sum(kernel.flops for kernel in _kernels(model, block)))


def _kernels(model: Model, block: Block) -> list[Kernel]:
    steps = steps_of(model.config)
    sublayers = [*(step.early for step in steps if step.early), *(step.sublayers for step in steps)]
    return [
        *itertools.chain.from_iterable(model.step(one, block) for one in sublayers),
        *model.ends(block),
    ]
