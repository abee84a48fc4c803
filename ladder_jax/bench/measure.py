"""Time the residuals in turns within one process, so that drift affects all of them alike; and
count the minimum traffic and compute of one device, the numerators of the shares of copy bandwidth
and matmul rate.
"""

import dataclasses
import functools
import itertools
import time
import zlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ladder_jax import decode, nn
from ladder_jax.bench.request import Request, Variant
from ladder_jax.config import Loop
from ladder_jax.decode import memory, sampling, steps as decoding, weights
from ladder_jax.nn import ModelDef, Params
from ladder_jax.predict.layers import every_kernel
from ladder_jax.predict.work import Model
from ladder_jax.terminal import progress

INSTEAD = "ask for a smaller --batch or --prompt-length, fewer --layers, or more --tensor devices"


@dataclasses.dataclass(frozen=True)
class Samples:
    """Seconds of one variant at one batch, one entry per repeat; entry i of every variant is from
    the same round.

    prefill: from the prompt to the first token. decode: of the following new_tokens - 1 steps.
    step_bytes, prefill_flops: minimum traffic and compute of one device (`decode_bytes`,
    `prefill_flops`).
    """

    variant: Variant
    batch: int
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    step_bytes: float
    prefill_flops: int

    @property
    def total(self) -> list[float]:
        return [p + d for p, d in zip(self.prefill, self.decode)]


def samples(request: Request, *, mesh: Mesh) -> tuple[Samples, ...]:
    """The samples of all variants and batches. Raises UserError if the memory is too small."""
    definitions = {name: nn.define(request.config(name), mesh=mesh) for name in request.residuals}
    rows = max(request.batches)
    model = Model(request.config(request.residuals[0]), request.tensor)
    parts = {"weights and cache": model.memory(rows=rows, capacity=request.capacity)}
    free = memory.free_memory(mesh.devices.flat[0], devices=mesh.size)
    memory.check(parts, free=free, what=f"{request.model} at batch {rows}", instead=INSTEAD)
    runs = {}
    found = []
    rounds = request.warmup + request.repeats
    total = len(request.batches) * len(request.variants) * (1 + rounds)
    done = itertools.count()
    with memory.explained("benchmarking", instead=INSTEAD), progress(total) as update:
        params = dict(zip(definitions, random_weights(list(definitions.values()))))
        for batch, variant in itertools.product(request.batches, request.variants):
            update(next(done), f"batch {batch}: compiling {variant.name}")
            one = variant.residual
            runs[batch, variant] = _generation(
                request, definitions[one], params[one], variant, batch
            )
        for batch in request.batches:
            seconds = {variant: [] for variant in request.variants}
            for variant in rounds * request.variants:
                update(next(done), f"batch {batch}: {variant.name}")
                seconds[variant].append(runs[batch, variant]())
            for variant, timings in seconds.items():
                found.append(_samples(request, variant, batch, timings[request.warmup :]))
    return tuple(found)


def _samples(
    request: Request, variant: Variant, batch: int, timings: list[tuple[float, float]]
) -> Samples:
    model = Model(request.config(variant.residual), request.tensor)
    shape = dict(rows=batch, prompt_length=request.prompt_length)
    return Samples(
        variant,
        batch,
        *zip(*timings),
        step_bytes=decode_bytes(model, new_tokens=request.new_tokens, **shape),
        prefill_flops=prefill_flops(model, **shape),
    )


def decode_bytes(model: Model, *, rows: int, prompt_length: int, new_tokens: int) -> float:
    """Bytes that a device must read and write in a decode step, as a mean over a generation's
    steps: the weights, of experts those that the rows choose if all are evenly loaded; the tokens'
    rows of the embedding table; and the filled part of the cache. Activations, logits and biases do
    not count; a key/value head that several devices share counts on each of them.
    """
    block = model.decode_step(rows=rows, prompt_length=prompt_length, new_tokens=new_tokens)
    kernels = every_kernel(model, block)
    return sum(count * (kernel.weights + kernel.cache) for count, kernel in kernels)


def prefill_flops(model: Model, *, rows: int, prompt_length: int) -> int:
    """Floating-point operations of a device's matmuls in a prefill, two per multiply-add. Logits
    are of each row's last position. The masked half of attention does not count, even if a kernel
    computes it.
    """
    block = model.prefill(rows=rows, prompt_length=prompt_length)
    return round(sum(count * kernel.flops for count, kernel in every_kernel(model, block)))


def _generation(
    request: Request,
    definition: ModelDef,
    params: Params,
    variant: Variant,
    batch: int,
) -> Callable[[], tuple[float, float]]:
    """Compile a generation. Returns a function that runs it once: () -> (prefill seconds, decode
    seconds).
    """
    sharding = definition.layout.sharding
    random = np.random.default_rng(0).integers(
        definition.config.vocab_size, size=(batch, request.prompt_length)
    )
    tokens = jax.device_put(random.astype(np.int32), sharding("BT"))
    lengths = jax.device_put(np.full(batch, request.prompt_length, np.int32), sharding("B"))
    keys = jax.random.split(jax.random.key(0), batch)
    settings = jax.device_put(decode.Settings.of(keys), sharding(sampling.DIMS))
    seen_in = decode.seen_in(definition)
    seen = seen_in(tokens, lengths)

    prefill = decode.prefill(definition, capacity=request.capacity, interleave=variant.interleave)
    prefill = prefill.compile(params, tokens, lengths)
    loop = decode.decode_many(definition, count=request.new_tokens - 1, choice=decode.Choice.GREEDY)
    loop = loop.compile(
        *decoding.abstract(definition, rows=batch, positions=request.capacity, loop=Loop.UNROLLED)
    )
    first = decode.sample_first(definition)

    def once() -> tuple[float, float]:
        # a new array, because the loop donates it
        loop_seen = jax.block_until_ready(seen_in(tokens, lengths))
        start = time.perf_counter()
        logits, caches = prefill(params, tokens, lengths)
        token, _ = jax.block_until_ready(first(logits, settings, lengths, seen))
        prefilled = time.perf_counter()
        jax.block_until_ready(loop(params, caches, loop_seen, token, lengths, settings))
        return prefilled - start, time.perf_counter() - prefilled

    return once


def random_weights(definitions: Sequence[ModelDef]) -> list[Params]:
    """Unrolled parameters of each definition in the compute dtype: gains of norms are 1, all others
    normal x 0.02.

    Each array is created in its dtype and sharding, without a float32 copy and without the host.
    Definitions share arrays of the same name, shape and sharding, because residuals differ in their
    connections, not in their weights.
    """

    @functools.cache
    def made(name, leaf):
        key = jax.random.fold_in(jax.random.key(0), zlib.crc32(name.encode()))
        return _initializer(leaf.shape, leaf.dtype, leaf.sharding, gain="scale" in name)(key)

    value = lambda path, leaf: made(jax.tree_util.keystr(path), leaf)
    abstract = [weights.abstract(definition, loop=Loop.UNROLLED) for definition in definitions]
    return [jax.tree_util.tree_map_with_path(value, tree) for tree in abstract]


@functools.cache
def _initializer(shape, dtype, sharding, *, gain: bool):
    """A compiled function key -> array, cached, so that a model of many layers needs only a few
    programs.
    """
    initialize = lambda key: (
        jnp.ones(shape, dtype) if gain else 0.02 * jax.random.normal(key, shape, dtype)
    )
    return jax.jit(initialize, out_shardings=sharding)
