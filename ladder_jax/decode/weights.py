"""Parameters as inference reads them: matrices in the compute dtype or in 8 bits; unrolled, each layer's arrays apart.

They are built one array at a time: each is read, cast or quantized, and fused or stacked before the next is read. So
the devices never hold more than the finished arrays and one array as it is stored.
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
from ladder_jax.nn import ModelDef, Params, parameter, quantized
from ladder_jax.nn.parameter import stacks
from ladder_jax.nn.quantized import Int8
from ladder_jax.parallel import Layout, apart, is_v5e, mesh, on_mesh, on_own_mesh, over_ranks

if TYPE_CHECKING:
    from ladder_jax.checkpoint import Key

type Reader = Callable[[Sequence[Key]], Iterator[jax.Array]]
"""Yields each key's array in turn, laid out as the definition has it, without L: `checkpoint.Pieces`, for example."""

FUSED = {  # matrices that are concatenated, and along which axis from the end: the same in a matrix and its scales
    "query_key_value": (("query", "key", "value"), -2),
    "gate_up": (("gate", "up"), -1),
}


def prepare(definition: ModelDef, params: Params | Reader, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """From parameters as they are trained and stored, in memory or read one by one (`checkpoint.Pieces`).

    In the compute dtype the values stay the same, as the model casts matrices where it uses them. Matrices that read
    the same input are fused where that is `faster_fused`. Beside the result no more is held than `peak_bytes` says;
    parameters in memory stay the caller's.
    """
    return _build(definition, params, _kept(definition, parameter.dims_of), loop=loop, quantize=quantize)


def stacked(definition: ModelDef, params: Params | Reader) -> Params:
    """The parameters in the compute dtype, by the names and shapes in which they are trained and stored."""
    return _build(definition, params, definition.dims, loop=Loop.SCAN, quantize=Quantize.NONE)


def dims(definition: ModelDef, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """The dimensions of `prepare`'s arrays."""
    of = lambda dims, layer: _stored_dims(quantize, dims if layer is None else dims.removeprefix("L"))
    return _each(definition, loop, of, _kept(definition, parameter.dims_of))


def abstract(definition: ModelDef, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> Params:
    """The shapes, dtypes and shardings of `prepare`'s arrays."""

    def place(array, dims, layer):
        if layer is not None:
            array, dims = jax.ShapeDtypeStruct(array.shape[1:], array.dtype), dims.removeprefix("L")
        stored = jax.eval_shape(lambda a: _stored(quantize, definition.config.dtype.value, a, dims), array)
        sharding = definition.layout.sharding
        return jax.tree.map(lambda a, d: a.update(sharding=sharding(d)), stored, _stored_dims(quantize, dims))

    shapes = _kept(definition, functools.partial(parameter.abstract, layout=definition.layout))
    return _each(definition, loop, place, shapes, _kept(definition, parameter.dims_of))


def peak_bytes(definition: ModelDef, *, loop: Loop, quantize: Quantize = Quantize.NONE) -> int:
    """The most that a device holds while `prepare` reads, its finished arrays included."""
    return _bytes(definition, _kept(definition, parameter.dims_of), loop=loop, quantize=quantize)[1]


def stacked_bytes(definition: ModelDef) -> tuple[int, int]:
    """A device's share of `stacked`'s arrays, and the most that it holds while they are read."""
    return _bytes(definition, definition.dims, loop=Loop.SCAN, quantize=Quantize.NONE)


def faster_fused(definition: ModelDef) -> bool:
    """Whether one matmul is faster than one each for queries, keys and values, and for gate and up.

    By the compilers' estimates of a decode step: 3 % fewer cycles on v5p, 8 % on v6e, 1 % more on tpu7x; on v5e 5 %
    fewer, but then a reduction and the larger matmul that should hide it do not fit into vector memory together, and
    ladder-2 hides none. A GPU launches three kernels a layer less; that was not timed.
    """
    kind = definition.layout.mesh.devices.flat[0].device_kind
    return kind != "TPU7x" and not is_v5e(kind)


def _kept(definition: ModelDef, of: Callable) -> Params:
    """`of` each module as inference has it. Raises UserError for a mesh that splits parameters for training."""
    if definition.layout.fsdp > 1:
        raise UserError(f"mesh.fsdp={definition.layout.fsdp} is for training: inference needs 1 (mesh.data copies)")
    modules = definition.fused if faster_fused(definition) else definition.modules
    return {name: of(module) for name, module in modules.items()}


def _each(definition: ModelDef, loop: Loop, fn: Callable, *trees: Params) -> Params:
    """fn(leaf, ..., layer) for every leaf: unrolled, once a layer for a leaf that stacks layers; else layer is None."""
    whole = functools.partial(fn, layer=None)
    if loop is Loop.SCAN:
        return jax.tree.map(whole, *trees)
    done = {}
    for name in trees[0]:
        below, of = [tree[name] for tree in trees], range(len(stacks(definition.config).get(name, ())))
        each = tuple(jax.tree.map(functools.partial(fn, layer=layer), *below) for layer in of)
        done[name] = each or jax.tree.map(whole, *below)
    return done


def _stored_dims(quantize: Quantize, dims: str) -> str | Int8:
    """The dimensions in which an array of these dimensions is stored."""
    return Int8.dims(dims) if quantize is Quantize.INT8 and quantized.is_matrix(dims) else dims


def _stored(quantize: Quantize, dtype: str, array: jax.Array, dims: str) -> jax.Array | Int8:
    if quantize is Quantize.INT8 and quantized.is_matrix(dims):
        return Int8.of(array, dims)
    return array.astype(_dtype(dtype, dims))


def _dtype(dtype: str, dims: str) -> Any:
    """Norm gains and routers stay float32: they multiply in it."""
    return dtype if len(dims.removeprefix("L")) > 1 and dims != mesh.ROUTER else jnp.float32


@dataclasses.dataclass(frozen=True)
class _Target:
    """An array to build, or one for every layer: its name, its dimensions without L, and the stored arrays in it.

    axis: along which `parts` are concatenated, counted from the end.
    """

    definition: ModelDef
    name: str
    dims: str
    parts: tuple[str, ...]
    axis: int

    @classmethod
    def of(cls, definition: ModelDef, name: str, dims: str) -> _Target:
        folder, _, own = name.rpartition("/")
        parts, axis = FUSED.get(own, ((own,), 0))
        return cls(definition, name, dims.removeprefix("L"), tuple(f"{folder}/{part}" for part in parts), axis)

    @property
    def layers(self) -> int:
        """How many its stack has; of an array outside the layers 0."""
        return len(stacks(self.definition.config).get(self.name.partition("/")[0], ()))

    @functools.cached_property
    def part_dims(self) -> tuple[str, ...]:
        stored = traverse_util.flatten_dict(self.definition.dims, sep="/")
        return tuple(stored[part].removeprefix("L") for part in self.parts)

    @functools.cached_property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """A device's share of each part, of one layer."""
        stored = traverse_util.flatten_dict(self.definition.abstract, sep="/")
        leaves = [stored[part] for part in self.parts]
        return tuple(leaf.sharding.shard_shape(leaf.shape)[self.layers > 0 :] for leaf in leaves)


def _targets(definition: ModelDef, kept: Params) -> list[_Target]:
    """The largest arrays first: then the least is held beside them. kept: the dimensions of all."""
    targets = [_Target.of(definition, *item) for item in traverse_util.flatten_dict(kept, sep="/").items()]
    return sorted(targets, key=lambda target: -max(map(math.prod, target.part_shapes)))


def _bytes(definition: ModelDef, kept: Params, *, loop: Loop, quantize: Quantize) -> tuple[int, int]:
    """A device's share of `_build`'s arrays, and the most that it holds meanwhile, from arrays stored in float32."""

    def sizes(shape: tuple[int, ...], dims: str) -> tuple[int, int]:
        """Bytes of a stored share, and of the float32 share that it is made from."""
        read = jax.ShapeDtypeStruct(shape, jnp.float32)
        stored = jax.eval_shape(lambda a: _stored(quantize, definition.config.dtype.value, a, dims), read)
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored))
        return size, 0 if stored == read else 4 * math.prod(shape)

    done, most = 0, 0
    for target in _targets(definition, kept):
        layers = target.layers or 1
        stored, read = zip(*map(sizes, target.part_shapes, target.part_dims))
        total = layers * sum(stored)
        in_place = loop is Loop.SCAN and target.layers  # into a stack, which is allocated with the first layer
        for index, size in enumerate(read):
            before = total + sum(stored[: index + 1]) if in_place else layers * sum(stored[: index + 1])
            most = max(most, done + before + size)
        if len(stored) > 1:
            most = max(most, done + total + sum(stored) * (1 + in_place))
        done += total
    return done, max(most, done)


def _build(definition: ModelDef, params: Params | Reader, kept: Params, *, loop: Loop, quantize: Quantize) -> Params:
    """The arrays whose dimensions are `kept`, unrolled or stacked as `loop` has them."""
    read = params if callable(params) else _in_memory(params)
    work = [_Work(target, loop, quantize) for target in _targets(definition, kept)]
    pieces = read([key for one in work for key in one.keys])
    done = traverse_util.unflatten_dict({one.target.name: one.build(pieces) for one in work}, sep="/")
    if loop is Loop.UNROLLED:
        for name, of in stacks(definition.config).items():
            is_layers, below = (lambda leaf: isinstance(leaf, tuple)), done[name]
            pick = lambda layer: jax.tree.map(lambda each: each[layer], below, is_leaf=is_layers)
            done[name] = tuple(map(pick, range(len(of))))
    return done


def _in_memory(params: Params) -> Callable:
    """A reader of parameters in memory. It yields whole stacks, each with the index of the layer to take from it."""
    flat = traverse_util.flatten_dict(params, sep="/")
    return lambda keys: ((flat[name], layer) for name, layer in keys)


@dataclasses.dataclass(frozen=True)
class _Work:
    """Builds one target from its parts."""

    target: _Target
    loop: Loop
    quantize: Quantize

    @property
    def keys(self) -> list[Key]:
        """The parts in the order of reading: unrolled part by part, so that a stack is read once; scanned by layer."""
        parts, layers = self.target.parts, range(self.target.layers)
        if not self.target.layers:
            return [(part, None) for part in parts]
        if self.loop is Loop.SCAN:
            return [(part, layer) for layer in layers for part in parts]
        return [(part, layer) for part in parts for layer in layers]

    def build(self, pieces: Iterator) -> Any:
        """The array, a tuple with one for each layer, or their stack. `pieces` yields the arrays of `keys`."""
        waiting, layers, stack = {}, [], None
        for part, layer in self.keys:
            waiting[part, layer] = self._make(pieces, part)
            if part != self.target.parts[-1]:
                continue
            value = self._fuse([waiting.pop((one, layer)) for one in self.target.parts])
            if layer is None:
                return value
            if self.loop is Loop.UNROLLED:
                layers.append(value)
                continue
            stack = self._empty(value) if stack is None else stack
            stack = jax.block_until_ready(mesh.put(stack, value, layer))
            del value
        return stack if self.loop is Loop.SCAN else tuple(layers)

    def _make(self, pieces: Iterator, part: str) -> jax.Array | Int8:
        """The next piece as it is to be stored. The piece that was read is freed on return."""
        piece, definition = next(pieces), self.target.definition
        array, layer = piece if isinstance(piece, tuple) else (piece, None)
        dims, dtype = self.target.part_dims[self.target.parts.index(part)], definition.config.dtype.value
        if layer is None and _is_stored(self.quantize, dtype, array, dims, definition.layout):
            return array
        return jax.block_until_ready(_convert(definition.layout, self.quantize, dtype, array, dims, layer))

    def _fuse(self, parts: list) -> jax.Array | Int8:
        if len(parts) == 1:
            return parts[0]
        of = functools.partial(_stored_dims, self.quantize)
        fuse = _fuser(
            self.target.definition.layout, tuple(map(of, self.target.part_dims)), of(self.target.dims), self.target.axis
        )
        return jax.block_until_ready(fuse(*parts))

    def _empty(self, value: jax.Array | Int8) -> jax.Array | Int8:
        definition = self.target.definition
        sharding, count = definition.layout.sharding, self.target.layers
        zeros = lambda a, d: mesh.zeros((count, *a.shape), a.dtype, sharding(f"L{d}"))
        return jax.tree.map(zeros, value, _stored_dims(self.quantize, self.target.dims))


def _is_stored(quantize: Quantize, dtype: str, array: jax.Array, dims: str, layout: Layout) -> bool:
    as_is = isinstance(_stored_dims(quantize, dims), str) and array.dtype == _dtype(dtype, dims)
    return as_is and isinstance(array, jax.Array) and array.sharding == layout.sharding(dims)


def _convert(
    layout: Layout, quantize: Quantize, dtype: str, array: jax.Array, dims: str, layer: int | None
) -> jax.Array | Int8:
    """An array, or a layer of a stack, as the compiled steps take it. One program for all layers of a stack."""
    return _converter(layout, quantize, dtype, dims)(array, layer)


@functools.cache
def _converter(layout: Layout, quantize: Quantize, dtype: str, dims: str) -> Callable:
    """A compiled (array or stack, layer or None) -> the array as it is stored."""
    out_dims = _stored_dims(quantize, dims)
    convert = lambda array, layer: _stored(quantize, dtype, array if layer is None else array[layer], dims)
    placed = jax.tree.map(layout.sharding, out_dims)
    return apart(jax.jit(on_own_mesh(convert, layout=layout, out_dims=out_dims), out_shardings=placed))


@functools.cache
def _fuser(layout: Layout, dims: tuple, out_dims: str | Int8, axis: int) -> Callable:
    """A compiled (arrays of these dimensions) -> one array, concatenated on each rank."""
    local = lambda *parts: jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis), *parts)
    ranked = over_ranks(local, layout=layout, in_dims=dims, out_dims=out_dims)
    meshed = on_mesh(ranked, layout=layout, in_dims=dims, out_dims=out_dims)
    return apart(jax.jit(meshed, out_shardings=jax.tree.map(layout.sharding, out_dims)))
