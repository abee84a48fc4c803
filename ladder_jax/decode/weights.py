"""Parameters as inference reads them: matrices in the compute dtype or in 8 bits, and, unrolled, each layer's apart."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ladder_jax.config import Loop, Quantize
from ladder_jax.nn import Definition, Params, quantized
from ladder_jax.nn.quantized import Int8
from ladder_jax.parallel import Layout


def prepare(definition: Definition, params: Params, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """From float32 parameters as trained and stored. The caller's arrays stay alive beside what is made.

    In the compute dtype the values agree: the model casts matrices as it uses them. In 8 bits each is
    made by itself, unrolled each layer's, so that beside the caller's arrays and the result (1/4 of
    their size) no more is held than one of them in float32. Drop the caller's, and 1/4 remains.
    """
    if quantize is Quantize.NONE:
        convert = functools.partial(_stored, quantize, definition.config.dtype.value)
        return jax.jit(lambda params: _each(definition, loop, convert, params, definition.dims))(params)
    convert = functools.partial(_made, definition.layout, quantize, definition.config.dtype.value)
    return _each(definition, loop, convert, params, definition.dims)


def dims(definition: Definition, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """The dimensions of `prepare`'s arrays."""
    return _each(definition, loop, functools.partial(_dims, quantize), definition.dims)


def abstract(definition: Definition, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """Their shapes, dtypes and shardings."""

    def place(array, dims, layer):
        stored = jax.eval_shape(lambda a: _stored(quantize, definition.config.dtype.value, a, dims, layer), array)
        sharding = definition.layout.sharding
        return jax.tree.map(lambda a, d: a.update(sharding=sharding(d)), stored, _dims(quantize, dims, layer))

    return _each(definition, loop, place, definition.abstract, definition.dims)


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
