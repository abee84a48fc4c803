"""Parameters as inference reads them: matrices in the compute dtype, and unrolled, each layer's arrays apart."""

from typing import Any

import jax

from ladder_jax.config import Loop
from ladder_jax.nn import Definition, Params


def prepare(definition: Definition, params: Params, *, loop: Loop) -> Params:
    """From float32 parameters as trained and stored. The model casts matrices as it uses them: the values agree."""

    def convert(params):
        cast = jax.tree.map(lambda a, d: a.astype(_dtype(definition, a, d)), params, definition.dims)
        return _unstack(definition, cast, lambda a, index: a[index]) if loop is Loop.UNROLLED else cast

    return jax.jit(convert)(params)


def dims(definition: Definition, *, loop: Loop) -> Params:
    """The dimensions of `prepare`'s arrays."""
    if loop is Loop.SCAN:
        return definition.dims
    return _unstack(definition, definition.dims, lambda d, _: d.removeprefix("L"))


def abstract(definition: Definition, *, loop: Loop) -> Params:
    """Their shapes, dtypes and shardings."""
    cast = jax.tree.map(lambda a, d: a.update(dtype=_dtype(definition, a, d)), definition.abstract, definition.dims)
    if loop is Loop.SCAN:
        return cast
    place = lambda a, d: jax.ShapeDtypeStruct(a.shape[1:], a.dtype, sharding=definition.layout.sharding(d[1:]))
    one = jax.tree.map(place, cast["layers"], definition.dims["layers"])
    return {**cast, "layers": (one,) * definition.config.num_layers}


def _dtype(definition: Definition, array: Any, dims: str) -> Any:
    """Norm gains stay float32: they multiply in it."""
    return definition.config.dtype.value if len(dims.removeprefix("L")) > 1 else array.dtype


def _unstack(definition: Definition, tree: Any, pick: Any) -> Any:
    count = definition.config.num_layers
    layers = tuple(jax.tree.map(lambda leaf, i=i: pick(leaf, i), tree["layers"]) for i in range(count))
    return {**tree, "layers": layers}
