"""Parameters as inference reads them: matrices in the compute dtype or in 8 bits, and, unrolled, each layer's apart."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ladder_jax.config import Loop, Quantize
from ladder_jax.decode import build, targets
from ladder_jax.decode.build import Reader
from ladder_jax.decode.targets import dims_of, stored
from ladder_jax.errors import UserError
from ladder_jax.nn import ModelDef, Params, parameter
from ladder_jax.parallel import is_v5e


def prepare(definition: ModelDef, params: Params | Reader, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """From parameters as trained and stored, in memory or from what reads them (`checkpoint.Pieces`).

    In the compute dtype the values agree: the model casts matrices as it uses them. Each array, unrolled each layer's,
    is made by itself, so that beside the result no more is held than `starting` says: the largest array as it is
    stored. Parameters in memory are the caller's, and stay beside that. Matrices that read the same input stand side by
    side where that is `faster_fused`.
    """
    return _build(definition, params, _kept(definition, parameter.dims_of), loop=loop, quantize=quantize)


def stacked(definition: ModelDef, params: Params | Reader) -> Params:
    """`prepare`d in the compute dtype, by the names and shapes that are trained and stored."""
    return _build(definition, params, definition.dims, loop=Loop.SCAN, quantize=Quantize.NONE)


def stacked_bytes(definition: ModelDef) -> tuple[int, int]:
    """A device's share of what `stacked` gives, and the most that it holds meanwhile."""
    return targets.sizes(definition, definition.dims, loop=Loop.SCAN, quantize=Quantize.NONE)


def dims(definition: ModelDef, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """The dimensions of `prepare`'s arrays."""
    return _each(definition, loop, functools.partial(_dims, quantize), _kept(definition, parameter.dims_of))


def abstract(definition: ModelDef, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """Their shapes, dtypes and shardings."""

    def place(array, dims, layer):
        if layer is not None:
            array, dims = jax.ShapeDtypeStruct(array.shape[1:], array.dtype), dims.removeprefix("L")
        kept = jax.eval_shape(lambda a: stored(quantize, definition.config.dtype.value, a, dims), array)
        sharding = definition.layout.sharding
        return jax.tree.map(lambda a, d: a.update(sharding=sharding(d)), kept, dims_of(quantize, dims))

    shapes = _kept(definition, functools.partial(parameter.abstract, layout=definition.layout))
    return _each(definition, loop, place, shapes, _kept(definition, parameter.dims_of))


def starting(definition: ModelDef, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> int:
    """The most bytes that a device holds while `prepare` reads, with all that is done by then."""
    return targets.sizes(definition, _kept(definition, parameter.dims_of), loop=loop, quantize=quantize)[1]


def faster_fused(definition: ModelDef) -> bool:
    """Whether one matmul is faster than those of queries, keys and values, and of gate and up, each for itself.

    By the compilers' estimates of a decode step: 3 % fewer cycles on v5p, 8 % on v6e, 1 % more on tpu7x; on v5e 5 %
    fewer, but then a reduction and the larger matmul that should hide it do not fit into vector memory together, and
    ladder-2 hides none. A GPU launches three kernels a layer less; that was not timed.
    """
    kind = definition.layout.mesh.devices.flat[0].device_kind
    return kind != "TPU7x" and not is_v5e(kind)


def _build(definition: ModelDef, params: Params | Reader, kept: Params, **form) -> Params:
    return build.build(definition, params if callable(params) else build.held(params), kept, **form)


def _kept(definition: ModelDef, of: Callable) -> Params:
    """`of` every module as inference keeps it. Raises UserError for a mesh that splits parameters for training."""
    if definition.layout.fsdp > 1:
        raise UserError(f"mesh.fsdp={definition.layout.fsdp} is for training: inference needs 1 (mesh.data copies)")
    modules = definition.fused if faster_fused(definition) else definition.modules
    return {name: of(module) for name, module in modules.items()}


def _each(definition: ModelDef, loop: Loop, fn: Callable, *trees: Params) -> Params:
    """fn(leaf, ..., layer) of every leaf: unrolled, once a layer of a leaf that holds them all; else layer is None."""
    whole = functools.partial(fn, layer=None)
    if loop is Loop.SCAN:
        return jax.tree.map(whole, *trees)
    rest = [{name: below for name, below in tree.items() if name != "layers"} for tree in trees]
    stacks = [tree["layers"] for tree in trees]
    count = definition.config.num_layers
    layers = tuple(jax.tree.map(functools.partial(fn, layer=layer), *stacks) for layer in range(count))
    return {**jax.tree.map(whole, *rest), "layers": layers}


def _dims(quantize: Quantize, dims: str, layer: Any) -> Any:
    return dims_of(quantize, dims if layer is None else dims.removeprefix("L"))
