"""The library's own programs, train step, prefill and decode step, as they are compiled for a request."""

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
from ladder_jax.schedule.targets import Target


def program(request: Request) -> tuple[Compiled, tuple[Any, ...]]:
    """The program and the shapes of its arguments, placed on the target's devices."""
    found = schedule.devices(request.target)
    if len(found) < request.fsdp * request.tensor:
        raise UserError(f"{request.target.name} has {len(found)} devices, fewer than --fsdp x --tensor")
    mesh = make_mesh(fsdp=request.fsdp, tensor=request.tensor, devices=found)
    definition = nn.define(request.config, mesh=mesh)

    def tokens(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=definition.layout.sharding("BT"[: len(shape)]))

    rows, loop, split = request.batch * request.fsdp, request.loop, request.sequence_parallel
    if request.phase is Phase.TRAIN:
        shape = dict(batch=rows, sequence=request.prompt_length, loop=loop, remat=request.remat)
        config = TrainConfig(**{**recipe(request.model), **shape}, sequence_parallel=split)
        arguments = train.abstract_state(definition, config=config), train.abstract_batch(definition, config=config)
        return train.train_step(definition, config=config), arguments
    form = dict(loop=loop, quantize=request.quantize)
    if request.phase is Phase.PREFILL:
        params = weights.abstract(definition, **form)
        step = decode.prefill(definition, capacity=request.context, sequence_parallel=split, **form)
        return step, (params, tokens(rows, request.prompt_length), tokens(rows))
    many = decode.decode_many(definition, choice=decode.Choice.GREEDY, launch=request.launch, **form)
    return many, steps.abstract(definition, rows=rows, positions=request.context, **form)


def compiler(target: Target) -> str:
    """The compiler's name and version."""
    packages = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin"), "cpu": ("jaxlib",)}
    for package in packages[target.platform]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
    return "unknown"


def bytes_minimum(request: Request, arguments: tuple[Any, ...]) -> int | None:
    """What one device must read in a decode step: its share of the weights once, less the embedding's rows
    that no token asks for, and of the caches once."""
    if request.phase is not Phase.DECODE:
        return None
    params, caches, *_ = arguments
    if "head" in params:
        params = {name: value for name, value in params.items() if name != "embedding"}
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves((params, caches)))
