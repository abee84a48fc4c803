"""Build the library's train step, prefill or decode step for a request."""

import contextlib
import importlib.metadata
import math
from typing import Any

import jax
import jax.numpy as jnp

from ladder_jax import decode, nn, schedule, train
from ladder_jax.config import Phase, TrainConfig, recipe
from ladder_jax.decode import steps, weights
from ladder_jax.errors import UserError
from ladder_jax.overlap.request import Request
from ladder_jax.parallel import Compiled, make_mesh
from ladder_jax.schedule import shards
from ladder_jax.schedule.targets import Target


def program(request: Request) -> tuple[Compiled, tuple[Any, ...]]:
    """The program, and the shapes of its arguments with shardings on the target's devices."""
    target_devices = schedule.devices(request.target)
    if len(target_devices) < request.fsdp * request.tensor:
        raise UserError(f"{request.target.name} has {len(target_devices)} devices, fewer than --fsdp x --tensor")
    mesh = make_mesh(fsdp=request.fsdp, tensor=request.tensor, devices=target_devices)
    definition = nn.define(request.config, mesh=mesh, experts=request.experts)

    def tokens(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=definition.layout.sharding("BT"[: len(shape)]))

    rows, loop = request.batch * request.fsdp, request.loop
    split = dict(
        sequence_parallel=request.sequence_parallel,
        collective_matmul=request.collective_matmul,
        interleave=request.interleave,
    )
    if request.phase is Phase.TRAIN:
        shape = dict(batch=rows, sequence=request.prompt_length, loop=loop, remat=request.remat)
        config = TrainConfig(**{**recipe(request.model), **shape, **split})
        arguments = train.abstract_state(definition, config=config), train.abstract_batch(definition, config=config)
        return train.train_step(definition, config=config), arguments
    settings = dict(loop=loop, quantize=request.quantize)
    if request.phase is Phase.PREFILL:
        params = weights.abstract(definition, **settings)
        step = decode.prefill(definition, capacity=request.context, launch=request.launch, **split, **settings)
        return step, (params, tokens(rows, request.prompt_length), tokens(rows))
    decode_loop = decode.decode_many(definition, choice=decode.Choice.GREEDY, launch=request.launch, **settings)
    return decode_loop, steps.abstract(definition, rows=rows, positions=request.context, **settings)


def compiler(target: Target) -> str:
    """The compiler's name and version."""
    packages = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin"), "cpu": ("jaxlib",)}
    for package in packages[target.platform]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
    return "unknown"


def bytes_minimum(request: Request, arguments: tuple[Any, ...]) -> int | None:
    """Bytes that one device must read in a decode step: its shards of the weights and of the caches, each once.

    The embedding table is left out if the head is another table: a step reads only its tokens' rows. So are experts
    that no token chooses, if all are evenly loaded.
    """
    if request.phase is not Phase.DECODE:
        return None
    params, caches, *_ = arguments
    if "head" in params:
        params = {name: value for name, value in params.items() if name != "embedding"}
    moe, total = request.config.moe, 0.0
    for path, array in jax.tree.leaves_with_path((params, caches)):
        size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        routed = any(getattr(key, "key", None) == "experts" for key in path)
        if routed:  # without those that fill up the last ranks
            size *= shards.chosen(moe, tokens=request.batch) * moe.experts / array.shape[0]
        total += size
    return round(total)
