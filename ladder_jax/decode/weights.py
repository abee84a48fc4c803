"""Parameters as inference reads them: matrices in the compute dtype or in 8 bits; unrolled, each layer's arrays apart.

They are built one array at a time: each is read, cast or quantized, and stacked before the next is read. So the
devices never hold more than the finished arrays and one array as it is stored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from ladder_jax.config import Loop, Quantize
from ladder_jax.errors import UserError
from ladder_jax.nn import ModelDef, Params, quantized
from ladder_jax.nn.parameter import stacks
from ladder_jax.nn.quantized import Int8
from ladder_jax.parallel import apart, mesh, on_own_mesh

if TYPE_CHECKING:
    from ladder_jax.checkpoint import Key

type Reader = Callable[[Sequence[Key]], Iterator[jax.Array]]
"""Yields each key's array in turn, laid out as the definition has it, without L: `checkpoint.Pieces`, for example."""


def prepare(definition: ModelDef, params: Params | Reader, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """From parameters as they are trained and stored, in memory or read one by one (`checkpoint.Pieces`).

    In the compute dtype the values stay the same, as the model casts matrices where it uses them. With Loop.SCAN and
    Quantize.NONE so do names and shapes. No more is held than `needed_bytes` says; parameters in memory stay the
    caller's.
    """
    _check(definition)
    read = params if callable(params) else _in_memory(params)
    targets = _targets(definition, loop=loop, quantize=quantize)
    pieces = read([key for target in targets for key in target.keys])
    done = traverse_util.unflatten_dict({target.name: target.build(pieces) for target in targets}, sep="/")
    if loop is Loop.UNROLLED:
        for name, of in stacks(definition.config).items():
            below = traverse_util.flatten_dict(done[name])
            layers = [{path: each[layer] for path, each in below.items()} for layer in range(len(of))]
            done[name] = tuple(map(traverse_util.unflatten_dict, layers))
    return done


def dims(definition: ModelDef, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """The dimensions of `prepare`'s arrays."""
    _check(definition)
    return _laid_out(definition, loop, functools.partial(_stored_dims, quantize), definition.dims)


def abstract(definition: ModelDef, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """The shapes, dtypes and shardings of `prepare`'s arrays."""
    sharding = definition.layout.sharding

    def place(array, dims):
        store = functools.partial(_stored, quantize, definition.config.dtype.value, dims=dims)
        stored = jax.eval_shape(store, array)
        return jax.tree.map(lambda a, d: a.update(sharding=sharding(d)), stored, _stored_dims(quantize, dims))

    _check(definition)
    return _laid_out(definition, loop, place, definition.abstract, definition.dims)


def needed_bytes(definition: ModelDef, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> tuple[int, int]:
    """A device's share of `prepare`'s arrays, and the most that it holds while they are read, stored in float32."""
    _check(definition)
    done = most = 0
    for target in _targets(definition, loop=loop, quantize=quantize):
        read = jax.ShapeDtypeStruct(target.share, jnp.float32)
        store = functools.partial(_stored, quantize, definition.config.dtype.value, dims=target.dims)
        stored = jax.eval_shape(store, read)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored))
        beside = 0 if stored == read else 4 * read.size
        beside += size if loop is Loop.SCAN and target.layers else 0  # its stack is allocated with the first layer
        done += size * (target.layers or 1)
        most = max(most, done + beside)
    return done, most


def _check(definition):
    """Raises UserError for a mesh that splits parameters for training."""
    if definition.layout.fsdp > 1:
        raise UserError(f"mesh.fsdp={definition.layout.fsdp} is for training: inference needs 1 (mesh.data copies)")


def _laid_out(definition, loop, fn, *trees):
    """fn(leaf, ...) of every array; unrolled, of one layer's arrays, for each of a stack's layers."""
    done = {}
    for name in definition.dims:
        below = [tree[name] for tree in trees]
        layers = stacks(definition.config).get(name, ())
        if loop is Loop.UNROLLED and layers:
            one = jax.tree.map(fn, *jax.tree.map(_of_layer, below))
            done[name] = (one,) * len(layers)
        else:
            done[name] = jax.tree.map(fn, *below)
    return done


def _of_layer(stack):
    """One layer's dimensions, or shape, of a stack's."""
    return stack[1:] if isinstance(stack, str) else jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)


def _stored_dims(quantize, dims):
    """The dimensions in which an array of these dimensions is stored."""
    return Int8.dims(dims) if quantize is Quantize.INT8 and quantized.is_matrix(dims) else dims


def _stored(quantize, dtype, array, dims):
    if quantize is Quantize.INT8 and quantized.is_matrix(dims):
        return Int8.of(array, dims)
    return array.astype(_dtype(dtype, dims))


def _dtype(dtype, dims):
    """Norm gains and routers stay float32: they multiply in it."""
    return dtype if len(dims.removeprefix("L")) > 1 and dims != mesh.ROUTER else jnp.float32


@dataclasses.dataclass(frozen=True)
class _Target:
    """An array to build, or one for every layer: its name, and its dimensions without L."""

    definition: ModelDef
    name: str
    dims: str
    loop: Loop
    quantize: Quantize

    @property
    def layers(self) -> int:
        """How many its stack has; of an array outside the layers 0."""
        return len(stacks(self.definition.config).get(self.name.partition("/")[0], ()))

    @functools.cached_property
    def share(self) -> tuple[int, ...]:
        """The shape of a device's share, of one layer."""
        stored = traverse_util.flatten_dict(self.definition.abstract, sep="/")[self.name]
        return stored.sharding.shard_shape(stored.shape)[self.layers > 0 :]

    @property
    def keys(self) -> list[Key]:
        return [(self.name, layer) for layer in range(self.layers)] or [(self.name, None)]

    def build(self, pieces: Iterator) -> Any:
        """The array, a tuple with one for each layer, or their stack. `pieces` yields the arrays of `keys`."""
        if not self.layers:
            return self._make(pieces)
        if self.loop is Loop.UNROLLED:
            return tuple(self._make(pieces) for _ in range(self.layers))
        stack = None
        for layer in range(self.layers):
            value = self._make(pieces)
            stack = self._empty(value) if stack is None else stack
            stack = jax.block_until_ready(mesh.put(stack, value, layer))
            del value
        return stack

    def _make(self, pieces):
        """The next piece as it is to be stored. The piece that was read is freed on return."""
        piece = next(pieces)
        dtype = self.definition.config.dtype.value
        layout = self.definition.layout
        array, layer = piece if isinstance(piece, tuple) else (piece, None)
        if layer is None and _is_stored(self.quantize, dtype, array, self.dims, layout):
            return array
        convert = _converter(layout, self.quantize, dtype, self.dims)
        return jax.block_until_ready(convert(array, layer))

    def _empty(self, value):
        sharding, count = self.definition.layout.sharding, self.layers
        zeros = lambda a, d: mesh.zeros((count, *a.shape), a.dtype, sharding(f"L{d}"))
        return jax.tree.map(zeros, value, _stored_dims(self.quantize, self.dims))


def _targets(definition, *, loop, quantize):
    """The largest arrays first: then the least is held beside them."""
    dims = traverse_util.flatten_dict(definition.dims, sep="/")
    targets = [_Target(definition, name, of.removeprefix("L"), loop, quantize) for name, of in dims.items()]
    return sorted(targets, key=lambda target: -math.prod(target.share))


def _in_memory(params):
    """A reader of parameters in memory. It yields whole stacks, each with the index of the layer to take from it."""
    flat = traverse_util.flatten_dict(params, sep="/")
    return lambda keys: ((flat[name], layer) for name, layer in keys)


def _is_stored(quantize, dtype, array, dims, layout):
    as_is = isinstance(_stored_dims(quantize, dims), str) and array.dtype == _dtype(dtype, dims)
    return as_is and isinstance(array, jax.Array) and array.sharding == layout.sharding(dims)


@functools.cache
def _converter(layout, quantize, dtype, dims):
    """A compiled (array or stack, layer or None) -> the array as it is stored. One for all layers of a stack."""
    out_dims = _stored_dims(quantize, dims)
    convert = lambda array, layer: _stored(quantize, dtype, array if layer is None else array[layer], dims)
    placed = jax.tree.map(layout.sharding, out_dims)
    return apart(jax.jit(on_own_mesh(convert, layout=layout, out_dims=out_dims), out_shardings=placed))
