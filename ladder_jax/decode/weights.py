"""Parameters as inference reads them: matrices in the compute dtype or in 8 bits; unrolled, each
layer's matrices apart.

Gains and biases stay stacked: the host hands over fewer arrays (of 80 layers 734 a decode call, not
892), and a program slices them once, before its token loop (`by_layer`).

They are built one array at a time: each is read, cast or quantized, and stacked before the next is
read. So the devices never hold more than the finished arrays and one array as it is stored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from ladder_jax.config import Loop, Quantize
from ladder_jax.config.fields import member
from ladder_jax.errors import UserError
from ladder_jax.nn import ModelDef, Params, quantized
from ladder_jax.nn.parameter import is_matrix, is_rounded, stacks
from ladder_jax.nn.quantized import Int8
from ladder_jax.parallel import apart, cache_programs, mesh, on_own_mesh

if TYPE_CHECKING:
    from ladder_jax.checkpoint import Key

type Reader = Callable[[Sequence[Key]], Iterator[jax.Array]]
"""Yields each key's array in turn, laid out as the definition has it, without L:
`checkpoint.Pieces`, for example.
"""


def prepare(
    definition: ModelDef, params: Params | Reader, *, loop: Loop, quantize: Quantize = Quantize.NONE
) -> Params:
    """From parameters as they are trained and stored, in memory or read one by one
    (`checkpoint.Pieces`).

    In the compute dtype the values stay the same, as the model casts matrices where it uses them.
    With Loop.SCAN and Quantize.NONE so do names and shapes. No more is held than `needed_bytes`
    says; parameters in memory stay the caller's, and what needs no change is shared.
    """
    _check_inference(definition)
    store = functools.partial(_kept, definition.layout, quantize, definition.dtype)
    if callable(params):
        return assemble(definition, params, store, loop=loop)
    arrays = traverse_util.flatten_dict(params, sep="/")
    make = lambda parameter, dims, layer: store(arrays[parameter.name], dims, layer)
    return _arranged(_parameters(definition), make, loop=loop)


def assemble(
    definition: ModelDef, read: Reader, store: Callable[[Any, str], Any], *, loop: Loop
) -> Params:
    """The arrays of `read`, each as `store`(array, its dimensions) keeps it before the next is
    read.
    """
    parameters = _parameters(definition)
    pieces = read(
        [(one.name, layer) for one in parameters for layer in range(one.layers) or [None]]
    )

    def make(parameter, dims, _):
        if dims == parameter.dims:
            return store(next(pieces), dims)
        stack = None
        for layer in range(parameter.layers):  # each is put into it before the next is read
            array = store(next(pieces), parameter.dims)
            if stack is None:
                stack = jax.tree.map(functools.partial(_stack_for, parameter.layers), array)
            stack = jax.block_until_ready(mesh.put(stack, array, layer))
            del array
        return stack

    return _arranged(parameters, make, loop=loop)


def by_layer(definition: ModelDef, params: Params, *, loop: Loop) -> Params:
    """`prepare`'s arrays as a forward pass takes them: unrolled, each stack as a tuple with each
    layer's own.
    """
    if loop is Loop.SCAN:
        return params
    of_layers = {}
    for name, layers in stacks(definition.config).items():
        of_layers[name] = tuple(_layer_of(params[name], layer) for layer in range(len(layers)))
    return {**params, **of_layers}


def _layer_of(stack, layer):
    is_own = lambda node: isinstance(node, tuple)
    return jax.tree.map(lambda a: a[layer], stack, is_leaf=is_own)


def _stack_for(layers, array):
    """Zeros for so many arrays like this one."""
    sharding = NamedSharding(array.sharding.mesh, PartitionSpec(None, *array.sharding.spec))
    return mesh.zeros((layers, *array.shape), array.dtype, sharding)


def dims(definition: ModelDef, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """The dimensions of `prepare`'s arrays."""
    _check_inference(definition)
    stored = lambda parameter, dims, _: _stored_dims(quantize, dims)
    return _arranged(_parameters(definition), stored, loop=loop)


def abstract(definition: ModelDef, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """The shapes, dtypes and shardings of `prepare`'s arrays."""
    place = functools.partial(_abstract, definition, quantize)
    return _arranged(_parameters(definition), place, loop=loop)


def _abstract(definition, quantize, parameter, dims, _=None):
    """Of one array, or of a stack, by its dimensions."""
    shape = parameter.piece.shape
    if dims != parameter.dims:
        shape = (parameter.layers, *shape)
    store = functools.partial(_stored, quantize, definition.dtype, dims=dims)
    stored = jax.eval_shape(store, jax.ShapeDtypeStruct(shape, jnp.float32))
    placed = jax.tree.map(definition.layout.sharding, _stored_dims(quantize, dims))
    return jax.tree.map(lambda a, sharding: a.update(sharding=sharding), stored, placed)


def needed_bytes(
    definition: ModelDef, *, loop: Loop, quantize: Quantize = Quantize.NONE
) -> tuple[int, int]:
    """A device's share of `prepare`'s arrays, and the most that it holds while they are read,
    stored in float32.
    """
    done = most = 0
    for one in _parameters(definition):
        size = shard_bytes(_abstract(definition, quantize, one, one.dims))
        read = shard_bytes(one.piece)
        # what is stored as it is read is not made again
        beside = read if size != read else 0
        # its stack is allocated before the first layer is read
        beside += size if one.is_stacked(loop) else 0
        done += size * (one.layers or 1)
        most = max(most, done + beside)
    return done, most


def shard_bytes(tree: Any) -> int:
    """A device's share of arrays, from their shapes, dtypes and shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _stored_dims(quantize, dims):
    """The dimensions in which an array of these dimensions is stored."""
    is_int8 = member(Quantize, "quantize", quantize) is Quantize.INT8
    return Int8.dims(dims) if is_int8 and quantized.is_quantized(dims) else dims


def _stored(quantize, dtype, array, dims):
    if _stored_dims(quantize, dims) != dims:
        return Int8.of(array, dims)
    return array.astype(_dtype(dtype, dims))


def _dtype(dtype, dims):
    return dtype if is_rounded(dims) else jnp.float32


def _check_inference(definition):
    """Raises UserError for a mesh that splits parameters for training."""
    if definition.layout.fsdp > 1:
        raise UserError(
            f"mesh.fsdp={definition.layout.fsdp} is for training: inference needs 1 (mesh.data copies)"
        )


class _Parameter(NamedTuple):
    """An array, or a stack of one for every layer.

    dims, piece: without L. layers: how many a stack has; of an array outside the layers 0.
    """

    name: str
    dims: str
    piece: jax.ShapeDtypeStruct
    layers: int

    def is_stacked(self, loop: Loop) -> bool:
        """Unrolled, a matrix is no slice of a stack: it would be copied before its matmul."""
        scanned = member(Loop, "loop", loop) is Loop.SCAN
        return self.layers > 0 and (scanned or not is_matrix(self.dims))


def _parameters(definition):
    """The largest arrays first: then the least is held beside them."""
    found = []
    for name, dims in traverse_util.flatten_dict(definition.dims, sep="/").items():
        layers = len(stacks(definition.config).get(name.partition("/")[0], ()))
        piece = definition.pieces[name]
        found.append(_Parameter(name, dims.removeprefix("L"), piece, layers))
    return sorted(found, key=lambda one: -shard_bytes(one.piece))


def _arranged(parameters, make, *, loop):
    """The tree of make(parameter, dims, layer): one array, whose layer is None, or a tuple of each
    layer's own.
    """
    made = {}
    for one in parameters:
        if one.is_stacked(loop):
            made[one.name] = make(one, f"L{one.dims}", None)
        elif one.layers:
            made[one.name] = tuple(make(one, one.dims, layer) for layer in range(one.layers))
        else:
            made[one.name] = make(one, one.dims, None)
    return traverse_util.unflatten_dict(made, sep="/")


def _kept(layout, quantize, dtype, array, dims, layer=None):
    """An array that was read, or the layer of a stack in memory, as it is to be stored. What was read
    is freed on return.
    """
    if layer is None and _stays(layout, quantize, dtype, array, dims):
        return array
    return jax.block_until_ready(_converter(layout, quantize, dtype, dims)(array, layer))


def _stays(layout, quantize, dtype, array, dims):
    """Whether an array is stored as it is."""
    is_stored = _stored_dims(quantize, dims) == dims and array.dtype == _dtype(dtype, dims)
    return is_stored and isinstance(array, jax.Array) and array.sharding == layout.sharding(dims)


@cache_programs
def _converter(layout, quantize, dtype, dims):
    """A compiled (array or stack, layer or None) -> the array, or the stack's layer, as it is stored."""
    out_dims = _stored_dims(quantize, dims)

    def convert(array, layer):
        return _stored(quantize, dtype, array if layer is None else array[layer], dims)

    placed = jax.tree.map(layout.sharding, out_dims)
    return apart(
        jax.jit(on_own_mesh(convert, layout=layout, out_dims=out_dims), out_shardings=placed)
    )
