"""Time the residuals in turns within one process, so that drift affects all of them alike."""

import dataclasses
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from ladder_jax import decode, nn
from ladder_jax.bench import programs, work
from ladder_jax.bench.request import Request, Variant
from ladder_jax.config import Loop
from ladder_jax.decode import memory, sampling
from ladder_jax.decode import steps as decoding
from ladder_jax.errors import UserError
from ladder_jax.nn import ModelDef, Params
from ladder_jax.schedule import roofline
from ladder_jax.schedule.roofline import Ceiling

INSTEAD = "ask for a smaller --batch or --prompt-length, fewer --layers, or more --tensor devices"


@dataclasses.dataclass(frozen=True)
class Samples:
    """Seconds of one variant at one batch, one entry per repeat; entry i of every variant is from the same round.

    prefill: from the prompt to the first token. decode: of the following new_tokens - 1 steps.
    step_bytes, prefill_flops: minimum traffic and compute of one device (see `work`).
    """

    residual: str
    batch: int
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    step_bytes: float
    prefill_flops: int
    interleave: int = 1

    @property
    def variant(self) -> Variant:
        return Variant(self.residual, self.interleave)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The device's limits (copy, matmul), and the samples of all residuals and batches."""

    copy: Ceiling
    matmul: Ceiling
    samples: tuple[Samples, ...]


def measure(request: Request, *, mesh: Mesh, advance: Callable[[str], None]) -> Measurement:
    """Measure everything. `advance(label)` is called before each step. Raises UserError if the memory is too small."""
    definitions, room = _checked(request, mesh=mesh)
    device, dtype = mesh.devices.flat[0], request.config(request.residuals[0]).dtype.value
    advance("the device's own limits")
    ceilings = roofline.copy_bandwidth(device, room=room), roofline.matmul_peak(device, dtype=dtype)
    return Measurement(*ceilings, _samples(request, definitions, room=room, advance=advance))


def samples(request: Request, *, mesh: Mesh) -> tuple[Samples, ...]:
    """As `measure`, without the device's limits."""
    definitions, room = _checked(request, mesh=mesh)
    return _samples(request, definitions, room=room, advance=lambda label: None)


def _checked(request: Request, *, mesh: Mesh) -> tuple[dict[str, ModelDef], int | None]:
    """The models by residual, and a device's free bytes, after a check that weights and cache fit; None if unknown."""
    definitions = {name: nn.define(request.config(name), mesh=mesh) for name in request.residuals}
    room = memory.room(mesh.devices.flat[0], devices=mesh.size)
    one, rows = definitions[request.residuals[0]], max(request.batches)
    cache_bytes = work.cache_bytes(one, rows=rows, capacity=_capacity(request))
    parts = {"weights": work.weight_bytes(definitions.values()), "cache": cache_bytes}
    memory.check(parts, room=room, what=f"{request.model} at batch {rows}", instead=INSTEAD)
    return definitions, room


def _samples(
    request: Request, definitions: dict[str, ModelDef], *, room: int | None, advance: Callable[[str], None]
) -> tuple[Samples, ...]:
    try:
        params = dict(zip(definitions, programs.random_weights(list(definitions.values()))))
        run = {}
        for batch in sorted(request.batches, reverse=True):  # largest first: if it does not fit, nothing is timed
            for variant in request.variants:
                advance(f"batch {batch}: compiling {variant.name}")
                model = definitions[variant.residual], params[variant.residual]
                run[batch, variant] = _generation(request, *model, variant, batch=batch, room=room)
        found = []
        for batch in request.batches:
            of_batch = {variant: run[batch, variant] for variant in request.variants}
            found += _batch(request, definitions, of_batch, batch, advance)
        return tuple(found)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"the device runs out of memory: {str(error).splitlines()[0][:200]}") from None


def steps(request: Request) -> int:
    """Number of steps of `measure`: it calls `advance` before each."""
    return 1 + len(request.batches) * len(request.variants) * (1 + request.warmup + request.repeats)


def rounds(names: tuple, *, count: int) -> list[tuple]:
    """`count` rounds of all names; each round starts with another name."""
    return [names[i % len(names) :] + names[: i % len(names)] for i in range(count)]


def _batch(request: Request, definitions: dict, run: dict, batch: int, advance: Callable) -> list[Samples]:
    shape = dict(rows=batch, prompt_length=request.prompt_length)
    seconds = {variant: [] for variant in request.variants}
    for index, order in enumerate(rounds(request.variants, count=request.warmup + request.repeats)):
        for variant in order:
            advance(f"batch {batch}: {variant.name}")
            timing = run[variant]()
            if index >= request.warmup:
                seconds[variant].append(timing)
    samples = []
    for variant, timings in seconds.items():
        definition = definitions[variant.residual]
        counted = dict(
            step_bytes=work.decode_bytes(definition, new_tokens=request.new_tokens, **shape),
            prefill_flops=work.prefill_flops(definition, **shape),
        )
        samples.append(Samples(variant.residual, batch, *zip(*timings), **counted, interleave=variant.interleave))
    return samples


def _generation(
    request: Request, definition: ModelDef, params: Params, variant: Variant, *, batch: int, room: int | None
) -> Callable[[], tuple[float, float]]:
    """Compile a generation. Returns a function that runs it once: () -> (prefill seconds, decode seconds)."""
    sharding = definition.layout.sharding
    random = np.random.default_rng(0).integers(definition.config.vocab_size, size=(batch, request.prompt_length))
    tokens = jax.device_put(random.astype(np.int32), sharding("BT"))
    lengths = jax.device_put(np.full(batch, request.prompt_length, np.int32), sharding("B"))
    keys = jax.random.split(jax.random.key(0), batch)
    settings = jax.device_put(decode.Settings.of(keys), sharding(sampling.DIMS))
    seen_in = decode.seen_in(definition)
    seen = seen_in(tokens, lengths)
    sizes = dict(rows=batch, positions=_capacity(request), loop=Loop.UNROLLED)

    prefill = decode.prefill(definition, capacity=_capacity(request), interleave=variant.interleave)
    prefill = prefill.compile(params, tokens, lengths)
    loop = decode.decode_many(definition, count=request.new_tokens - 1, choice=decode.Choice.GREEDY)
    loop = loop.compile(*decoding.abstract(definition, **sizes))
    for phase, compiled in (("the prefill", prefill), ("decoding", loop)):
        sizes = compiled.memory_analysis()
        outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        parts = {"arguments": sizes.argument_size_in_bytes, "temporaries": sizes.temp_size_in_bytes, "results": outputs}
        what = f"{phase} of {variant.name} at batch {batch}"
        memory.check(parts, room=room, what=what, instead=INSTEAD)
    first = decode.sample_first(definition)

    def once() -> tuple[float, float]:
        loop_seen = jax.block_until_ready(seen_in(tokens, lengths))  # a new array, because the loop donates it
        start = time.perf_counter()
        logits, caches = prefill(params, tokens, lengths)
        token, _ = jax.block_until_ready(first(logits, settings, lengths, seen))
        prefilled = time.perf_counter()
        jax.block_until_ready(loop(params, caches, loop_seen, token, lengths, settings))
        return prefilled - start, time.perf_counter() - prefilled

    return once


def _capacity(request: Request) -> int:
    return request.prompt_length + request.new_tokens
