"""Parameters as inference reads them: matrices in the compute dtype or in 8 bits, and, unrolled, each layer's apart."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ladder_jax.config import Loop, Quantize
from ladder_jax.errors import UserError
from ladder_jax.nn import Definition, Params, parameter, quantized
from ladder_jax.nn.quantized import Int8
from ladder_jax.parallel import Layout, is_v5e, on_mesh, over_ranks


def prepare(definition: Definition, params: Params, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """From float32 parameters as trained and stored. The caller's arrays stay alive beside what is made.

    In the compute dtype the values agree: the model casts matrices as it uses them. In 8 bits each is
    made by itself, unrolled each layer's, so that beside the caller's arrays and the result (1/4 of
    their size) no more is held than a layer of the result and one matrix in float32. Drop the caller's,
    and 1/4 remains. Matrices that read the same input stand side by side where that is `faster_joined`.
    """
    join = functools.partial(_join, definition, loop, quantize) if faster_joined(definition) else lambda params: params
    if quantize is Quantize.NONE:
        convert = functools.partial(_stored, quantize, definition.config.dtype.value)
        return jax.jit(lambda params: join(_each(definition, loop, convert, params, definition.dims)))(params)
    convert = functools.partial(_made, definition.layout, quantize, definition.config.dtype.value)
    return join(_each(definition, loop, convert, params, definition.dims))


def dims(definition: Definition, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """The dimensions of `prepare`'s arrays."""
    return _each(definition, loop, functools.partial(_dims, quantize), _kept(definition, parameter.dims_of))


def abstract(definition: Definition, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """Their shapes, dtypes and shardings."""

    def place(array, dims, layer):
        stored = jax.eval_shape(lambda a: _stored(quantize, definition.config.dtype.value, a, dims, layer), array)
        sharding = definition.layout.sharding
        return jax.tree.map(lambda a, d: a.update(sharding=sharding(d)), stored, _dims(quantize, dims, layer))

    shapes = _kept(definition, functools.partial(parameter.abstract, layout=definition.layout))
    return _each(definition, loop, place, shapes, _kept(definition, parameter.dims_of))


def faster_joined(definition: Definition) -> bool:
    """Whether one matmul is faster than those of queries, keys and values, and of gate and up, each for itself.

    By the compilers' estimates of a decode step: 3 % fewer cycles on v5p, 8 % on v6e, 1 % more on tpu7x; on v5e 5 %
    fewer, but then a reduction and the larger matmul that should hide it do not fit into vector memory together, and
    ladder-2 hides none. A GPU launches three kernels a layer less; that was not timed.
    """
    kind = definition.layout.mesh.devices.flat[0].device_kind
    return kind != "TPU7x" and not is_v5e(kind)


def _kept(definition: Definition, of: Callable) -> Params:
    """`of` every module as inference keeps it. Raises UserError for a mesh that splits parameters for training."""
    if definition.layout.fsdp > 1:
        raise UserError(f"mesh.fsdp={definition.layout.fsdp} is for training: inference needs 1 (mesh.data copies)")
    modules = definition.joined if faster_joined(definition) else definition.modules
    return {name: of(module) for name, module in modules.items()}


def _join(definition: Definition, loop: Loop, quantize: Quantize, params: Params) -> Params:
    layers, call = params["layers"], _joiner(definition, loop, quantize)
    return {**params, "layers": call(layers) if loop is Loop.SCAN else tuple(map(call, layers))}


@functools.cache
def _joiner(definition: Definition, loop: Loop, quantize: Quantize) -> Callable:
    """A compiled layer -> layer with joined matrices; of all layers' stacks for a scan."""

    def local(layer):
        attention, mlp = dict(layer["attention"]), dict(layer["mlp"])
        heads = [attention.pop(name) for name in ("query", "key", "value")]
        features = [mlp.pop(name) for name in ("gate", "up")]
        attention["query_key_value"], mlp["gate_up"] = beside(heads, axis=-2), beside(features, axis=-1)
        return {**layer, "attention": attention, "mlp": mlp}

    # The axis counts from the end: it is the same in a matrix and in its scales.
    beside = lambda parts, axis: jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis), *parts)

    def of_layer(trees):
        found = _each(definition, loop, functools.partial(_dims, quantize), trees)["layers"]
        return found if loop is Loop.SCAN else found[0]

    dims = dict(in_dims=(of_layer(definition.dims),), out_dims=of_layer(_kept(definition, parameter.dims_of)))
    ranked = over_ranks(local, layout=definition.layout, **dims)
    return jax.jit(on_mesh(ranked, layout=definition.layout, **dims))


def _each(definition: Definition, loop: Loop, fn: Callable, *trees: Params) -> Params:
    """fn(leaf, ..., layer) of every leaf: unrolled, once a layer of a leaf that holds them all; else layer is None."""
    whole = functools.partial(fn, layer=None)
    if loop is Loop.SCAN:
        return jax.tree.map(whole, *trees)
    rest = [{name: below for name, below in tree.items() if name != "layers"} for tree in trees]
    stacks = [tree["layers"] for tree in trees]
    count = definition.config.num_layers
    layers = tuple(jax.tree.map(functools.partial(fn, layer=layer), *stacks) for layer in range(count))
    return {**jax.tree.map(whole, *rest), "layers": layers}


def _dims(quantize: Quantize, dims: str, layer: Any) -> str | Int8:
    dims = dims if layer is None else dims.removeprefix("L")
    return Int8.dims(dims) if quantize is Quantize.INT8 and quantized.is_matrix(dims) else dims


def _stored(quantize: Quantize, dtype: str, array: jax.Array, dims: str, layer: Any) -> jax.Array | Int8:
    """A leaf, or one layer of it, as it is stored. Norm gains stay float32: they multiply in it."""
    if layer is not None:
        array, dims = array[layer], dims.removeprefix("L")
    if quantize is Quantize.INT8 and quantized.is_matrix(dims):
        return Int8.of(array, dims)
    return array.astype(dtype) if len(dims.removeprefix("L")) > 1 else array


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 4))
def _made(layout: Layout, quantize: Quantize, dtype: str, array: jax.Array, dims: str, layer: Any) -> jax.Array | Int8:
    """`_stored`, compiled once for all layers, laid out as the compiled steps take it."""
    place = lambda a, d: jax.lax.with_sharding_constraint(a, layout.sharding(d))
    return jax.tree.map(place, _stored(quantize, dtype, array, dims, layer), _dims(quantize, dims, layer))
