"""Weights built one array at a time: each is read, cast or quantized, and joined or stacked before the next is read.

So the devices never hold more than what is done and one array as it was stored.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from ladder_jax.config import Loop, Quantize
from ladder_jax.decode.targets import Target, dims_of, dtype_of, stored, targets
from ladder_jax.nn import ModelDef, Params
from ladder_jax.nn.quantized import Int8
from ladder_jax.parallel import Layout, on_mesh, over_ranks, placing

Key = tuple[str, int | None]  # an array's name, such as "layers/mlp/up", and of a stack one of its layers
Reader = Callable[[Sequence[Key]], Iterator[jax.Array]]
"""Gives each key's array in turn, laid out as the definition has it, without L: `checkpoint.Pieces`, say."""


def build(definition: ModelDef, read: Reader, kept: Params, *, loop: Loop, quantize: Quantize) -> Params:
    """The arrays of which `kept` gives the dimensions, layers unrolled or stacked as `loop` has them."""
    work = [_Work(definition, target, loop, quantize) for target in targets(definition, kept)]
    pieces = read([key for one in work for key in one.keys])
    done = {one.target.name: one.build(pieces) for one in work}
    alone = {name: value for name, value in done.items() if not name.startswith("layers/")}
    layers = {name.removeprefix("layers/"): value for name, value in done.items() if name.startswith("layers/")}
    nested = functools.partial(traverse_util.unflatten_dict, sep="/")
    if loop is Loop.SCAN:
        return {**nested(alone), "layers": nested(layers)}
    each = range(definition.config.num_layers)
    return {**nested(alone), "layers": tuple(nested({n: of[i] for n, of in layers.items()}) for i in each)}


def held(params: Params) -> Reader:
    """Of parameters that are in memory. A stack is given as it is, with the layer's number: `_made` takes it out."""
    flat = traverse_util.flatten_dict(params, sep="/")
    return lambda keys: ((flat[name], layer) for name, layer in keys)


@dataclasses.dataclass(frozen=True)
class _Work:
    definition: ModelDef
    target: Target
    loop: Loop
    quantize: Quantize

    @property
    def keys(self) -> list[Key]:
        """Every part in turn, of all layers, so that a stack is read once; for a scan, layers in turn."""
        parts, layers = self.target.parts, range(self.definition.config.num_layers)
        if not self.target.stacked:
            return [(part, None) for part in parts]
        if self.loop is Loop.SCAN:
            return [(part, layer) for layer in layers for part in parts]
        return [(part, layer) for part in parts for layer in layers]

    def build(self, pieces: Iterator) -> Any:
        """The array, a tuple of one a layer, or their stack. `pieces` gives those of `keys`."""
        waiting, layers, stack = {}, [], None
        for part, layer in self.keys:
            waiting[part, layer] = self._make(pieces, part)
            if part != self.target.parts[-1]:
                continue
            value = self._join([waiting.pop((one, layer)) for one in self.target.parts])
            if layer is None:
                return value
            if self.loop is Loop.UNROLLED:
                layers.append(value)
                continue
            stack = self._empty(value) if stack is None else stack
            stack = jax.block_until_ready(placing.put(stack, value, layer))
            del value
        return stack if self.loop is Loop.SCAN else tuple(layers)

    def _make(self, pieces: Iterator, part: str) -> jax.Array | Int8:
        """The next piece as it is stored. It is the only one in memory: what it was made from is gone on return."""
        piece, layout = next(pieces), self.definition.layout
        array, layer = piece if isinstance(piece, tuple) else (piece, None)
        dims, dtype = self._part_dims(part), self.definition.config.dtype.value
        if layer is None and _is_stored(self.quantize, dtype, array, dims, layout):
            return array
        return jax.block_until_ready(_made(layout, self.quantize, dtype, array, dims, layer))

    def _join(self, parts: list) -> jax.Array | Int8:
        if len(parts) == 1:
            return parts[0]
        of = functools.partial(dims_of, self.quantize)
        dims = tuple(of(self._part_dims(part)) for part in self.target.parts)
        return jax.block_until_ready(
            _joiner(self.definition.layout, dims, of(self.target.dims), self.target.axis)(*parts)
        )

    def _part_dims(self, part: str) -> str:
        return traverse_util.flatten_dict(self.definition.dims, sep="/")[part].removeprefix("L")

    def _empty(self, value: jax.Array | Int8) -> jax.Array | Int8:
        sharding, count = self.definition.layout.sharding, self.definition.config.num_layers
        zeros = lambda a, d: placing.zeros((count, *a.shape), a.dtype, sharding(f"L{d}"))
        return jax.tree.map(zeros, value, dims_of(self.quantize, self.target.dims))


def _is_stored(quantize: Quantize, dtype: str, array: jax.Array, dims: str, layout: Layout) -> bool:
    as_is = isinstance(dims_of(quantize, dims), str) and array.dtype == dtype_of(dtype, dims)
    return as_is and isinstance(array, jax.Array) and array.sharding == layout.sharding(dims)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 4))
def _made(layout: Layout, quantize: Quantize, dtype: str, array: jax.Array, dims: str, layer: Any) -> jax.Array | Int8:
    """`stored`, of a stack its layer; compiled once for all layers, laid out as the compiled steps take it."""
    place = lambda a, d: jax.lax.with_sharding_constraint(a, layout.sharding(d))
    array = array if layer is None else array[layer]
    return jax.tree.map(place, stored(quantize, dtype, array, dims), dims_of(quantize, dims))


@functools.cache
def _joiner(layout: Layout, dims: tuple, out_dims: str | Int8, axis: int) -> Callable:
    """A compiled (arrays with these dimensions) -> one array, on each rank side by side."""
    local = lambda *parts: jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis), *parts)
    ranked = over_ranks(local, layout=layout, in_dims=dims, out_dims=out_dims)
    return jax.jit(on_mesh(ranked, layout=layout, in_dims=dims, out_dims=out_dims))
