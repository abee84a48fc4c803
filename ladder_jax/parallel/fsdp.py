"""Parameters split over the fsdp axis (ZeRO-3, arXiv 1910.02054) and gathered only while a layer computes with them.

A rank holds a shard of every array along D. Matrices are gathered one layer at a time, in the compute dtype
(nn/prefetch.py decides when); each gradient is reduce-scattered in float32. Norm gains and other vectors are so small
that latency dominates: those of all layers are gathered together.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ladder_jax.parallel.collectives import GATHER, SCATTER, all_gather, pvary, reduce_scatter, varying
from ladder_jax.parallel.mesh import FSDP, ROUTER


def unshard(params: Any, dims: Any, *, dtype: jnp.dtype) -> Any:
    """The arrays of `params`, a rank's shards, gathered along D; matrices in `dtype`.

    dims: a tree of the arrays' dimensions, such as "DNH".
    Gradients are summed over the ranks of the axis in float32.
    """
    return jax.tree.map(lambda dims, a: _unsharded(a, dims, dtype) if "D" in dims else a, dims, params)


def with_vectors(params: Any, dims: Any) -> Any:
    """All layers' stacked parameters, every vector ("LD") gathered; matrices stay shards."""
    return jax.tree.map(lambda dims, a: _unsharded(a, dims, a.dtype) if dims == "LD" else a, dims, params)


@dataclasses.dataclass(frozen=True)
class FsdpLayer:
    """Gathers the matrices of one layer, and reduce-scatters their gradients.

    dims: a tree of one layer's dimensions. `with_vectors` has gathered the vectors before.
    trains: a tree of booleans, False for parameters without a gradient, such as the matrices beside low-rank factors;
        None: all have one.
    """

    dims: Any
    dtype: jnp.dtype
    trains: Any = None

    def gather(self, shares: Any) -> Any:
        return jax.tree.map(lambda dims, a: _unsharded(a, dims, self.dtype) if _split(dims) else a, self.dims, shares)

    def scatter(self, gradients: list[jax.Array]) -> list[jax.Array]:
        """Float32 shards of the `trained` parameters' gradients, summed over the fsdp axis."""
        give = lambda dims, g: _give_back(g, dims.index("D")) if _split(dims) else g
        return list(map(give, self.trained(self.dims), gradients))

    def trained(self, tree: Any) -> list:
        """The leaves of a layer's tree, or of the layers' stack, that have a gradient."""
        return [leaf for leaf, trains in zip(jax.tree.leaves(tree), self._flags()) if trains]

    def with_frozen(self, params: Any, gradients: Sequence[jax.Array]) -> Any:
        """The `trained` parameters' gradients as a tree like `params`; zeros for the others."""
        left, (leaves, tree) = iter(gradients), jax.tree.flatten(params)
        zeros = lambda a: pvary(jnp.zeros(a.shape, a.dtype), varying(a))
        return tree.unflatten([next(left) if trains else zeros(a) for a, trains in zip(leaves, self._flags())])

    def _flags(self) -> list[bool]:
        return jax.tree.leaves(jax.tree.map(lambda _: True, self.dims) if self.trains is None else self.trains)


def _split(dims: str) -> bool:
    return "D" in dims and len(dims) > 1


def _unsharded(array: jax.Array, dims: str, dtype: jnp.dtype) -> jax.Array:
    stays = len(dims.removeprefix("L")) == 1 or dims.endswith(ROUTER)  # norm gains multiply in float32
    return _gather(array, dims.index("D"), jnp.dtype(array.dtype if stays else dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(share: jax.Array, axis: int, dtype: jnp.dtype) -> jax.Array:
    with jax.named_scope(GATHER):
        return all_gather(share.astype(dtype), (FSDP,), dimension=axis)


def _give_back(gradient: jax.Array, axis: int) -> jax.Array:
    with jax.named_scope(SCATTER):
        return reduce_scatter(gradient.astype(jnp.float32), (FSDP,), dimension=axis)


_gather.defvjp(
    lambda share, axis, dtype: (_gather(share, axis, dtype), jnp.zeros((), share.dtype)),
    lambda axis, dtype, like, gradient: (_give_back(gradient, axis).astype(like.dtype),),
)
