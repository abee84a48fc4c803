"""The few collectives that the library uses, by name, valid inside `on_mesh` and `over_ranks`; the
gather of parameters that are split over the fsdp axis; and kernels that know no varying types,
called there.
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from ladder_jax.config import Launch
from ladder_jax.errors import UserError, unknown
from ladder_jax.scopes import FSDP, GATHER, SCATTER

Axes = tuple[str, ...]  # of a mesh: the ranks along all of them

EMULATED = "emulated_rank"
"""The axis of emulated ranks, all on one device: a `vmap`'s, not the mesh's (see `over_ranks`)."""

# the dimensions of a router, which is gathered and stored in float32, as it chooses in it
ROUTER = "DC"


def named(place: str, within: str = "") -> AbstractContextManager:
    """The name scope of a place, and of PREVIOUS or FOLLOWING in it."""
    return jax.named_scope(f"{place}/{within}" if within else place)


def varying(x: Array) -> frozenset[str]:
    """The mesh axes over which `x` may differ, by its type."""
    return jax.typeof(x).manual_axis_type.varying


def pvary(x: Array, axes: Iterable[str]) -> Array:
    """`x`, equal on all ranks of `axes`, typed as a value that may differ between them.

    Free in the forward pass. Its transpose all-reduces the gradient over the axes that were added,
    so the place of this call decides where the backward pass communicates.
    """
    # Sorted, because the order becomes part of the program: a set's differs from process to
    # process.
    missing = tuple(axis for axis in sorted(axes) if axis != EMULATED and axis not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_alike(*arrays: Array) -> list[Array]:
    """`arrays`, each typed as a value that may differ wherever one of them may."""
    axes = frozenset.union(*map(varying, arrays))
    return [pvary(x, axes) for x in arrays]


def all_reduce(x: Array, axes: Axes) -> Array:
    """The sum of every rank's `x`, on every rank."""
    return lax.psum(x, axes)


# what some versions call them
ALIASES = {"TPU v5e": "TPU v5 lite", "TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite"}


def kind_of(device_kind: str) -> str:
    """The table's name for a kind of device (`jax.Device.device_kind`)."""
    return "NVIDIA" if device_kind.startswith("NVIDIA") else ALIASES.get(device_kind, device_kind)


def is_v5e(device_kind: str) -> bool:
    """v5e is the one TPU that overlaps reductions by fusing them with matmuls, in its vector
    memory.
    """
    return kind_of(device_kind) == "TPU v5 lite"


HALVES = ("NVIDIA", "TPU v5", "TPU v6 lite", "TPU7x")
"""Kinds of devices whose compilers have all-reduces in two halves: not a CPU's, which aborts, nor a
v5e's.

Of a whole all-reduce the compiler makes such halves, too, but it leaves only as much compute
between them as its own estimate of the transfer demands: of a sublayer of a decode step a third.
The whole sublayer stands there by residual/wires/async_all_reduce.py. On NVIDIA GPUs that hides
XLA's one-kernel all-reduce, which the compiler never hides.
"""


def resolve_launch(launch: Launch, *, mesh: Mesh) -> Launch:
    """CHAINED or EXPLICIT for programs on `mesh`. Raises UserError for EXPLICIT where it is not
    supported.
    """
    kind = mesh.devices.flat[0].device_kind
    missing = None
    if kind_of(kind) not in HALVES:
        missing = f"launch 'explicit' is for NVIDIA GPUs and for TPUs from v5p on, not for {kind}: use 'auto'"
    # Its compiler for GPUs refuses what jax 0.11 starts: "Shardy propagation doesn't support
    # tuples".
    elif _psum_start() is None or (kind_of(kind) == "NVIDIA" and jax.__version_info__ < (0, 12)):
        missing = f"launch 'explicit' needs a jax with started collectives, and {jax.__version__} has none: use 'auto'"
    if launch is Launch.AUTO:
        return Launch.CHAINED if missing else Launch.EXPLICIT
    if launch is Launch.EXPLICIT and missing:
        raise UserError(missing)
    return launch


def start_all_reduce(x: Array, axes: Axes) -> Any:
    """The first half of `all_reduce`; its `.done()` is the second. No gradient: for prefill and
    decode.
    """
    return _psum_start()(x, axes)


def _psum_start():
    """jax's, which is not public."""
    try:
        from jax._src.lax.parallel import psum_start
    except ImportError:
        return None
    return psum_start


def reduce_scatter(x: Array, axes: Axes, *, dimension: int) -> Array:
    """The sum of every rank's `x`, of which each rank gets its share of `dimension`."""
    return lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)


def all_gather(x: Array, axes: Axes, *, dimension: int) -> Array:
    """Every rank's `x`, joined along `dimension`. Its transpose is `reduce_scatter`."""
    return lax.all_gather(x, axes, axis=dimension, tiled=True)


def permute(x: Array, axes: Axes, *, step: int) -> Array:
    """The `x` of the rank that is `step` before this one, around the ring of ranks."""
    count = ranks(axes)
    return lax.ppermute(x, axes, [(source, (source + step) % count) for source in range(count)])


def all_ranks(x: Array, axes: Axes) -> Array:
    """Every rank's `x`, stacked [ranks, ...], as a value that is the same on all of them."""
    if EMULATED in axes:  # a vmap's axis has no varying types, and jax 0.11 looks for them
        return lax.all_gather(x, axes, axis=0)
    return lax.all_gather(pvary(x, axes), axes, axis=0, to="invarying")


def opaque_copy(partial: Array | None, axes: Axes) -> Array | None:
    """A copy of `partial` that the compiler cannot identify with it: the all-reduce's operand,
    where a sublayer reads `partial` too.

    Without it v5e hides no all-reduce, because it fuses one with matmuls only where nothing else
    reads its operand; and v5p, unrolled, hides 3 of 8 instead of 7, because it issues every second
    one after the matmuls.
    """
    if partial is None or ranks(axes) == 1:
        return partial
    return jnp.where(lax.axis_index(axes) >= 0, partial, 0)


def all_max(x: Array, axes: Axes) -> Array:
    """The largest of every rank's `x`, elementwise, on every rank. Not differentiable."""
    return lax.pmax(x, axes)


def anywhere(*flags: Array) -> tuple[Array, ...]:
    """For each [B] bool whether any row of it is true, on any rank of the whole mesh: scalars.

    For branches with collectives in them: ranks that disagreed would wait for each other. Ranks
    that hold the same rows agree as it is; those of the axes over which rows are split are asked,
    in one all-reduce.
    """
    found = jnp.any(jnp.stack(flags), axis=-1)
    others = tuple(axis for axis in sorted(varying(found)) if ranks((axis,)) > 1)
    return tuple(all_max(found.astype(jnp.int32), others) > 0 if others else found)


def rank(axes: Axes) -> Array:
    """This rank's index along `axes`, a scalar."""
    return lax.axis_index(axes)


def ranks(axes: Axes) -> int:
    return lax.axis_size(axes)


def check_axes(axes: Axes) -> None:
    """Raises UserError for a name in place of a tuple, and for axes that the enclosing shard_map
    does not have.
    """
    if isinstance(axes, str):
        raise UserError(f"axes must be a tuple of the mesh's axes, as in ({axes!r},), not {axes!r}")
    if not isinstance(axes, tuple | list) or not all(isinstance(axis, str) for axis in axes):
        raise UserError(f"axes must be a tuple of the mesh's axes' names, not {axes!r:.60}")
    for axis in axes:
        try:
            lax.axis_size(axis)
        except NameError:
            known = sorted(jax.sharding.get_abstract_mesh().manual_axes)
            if known:
                raise unknown("mesh axis", axis, known) from None
            raise UserError(
                f"there are no ranks of {axis!r} here: call it inside jax.shard_map"
            ) from None


def unshard(params: Any, dims: Any, *, dtype: jnp.dtype) -> Any:
    """The arrays of `params`, a rank's shards, gathered along D; matrices in `dtype`.

    Parameters are split over the fsdp axis (ZeRO-3, arXiv 1910.02054) and gathered only while a
    layer computes with them. A rank holds a shard of every array along D. Matrices are gathered one
    layer at a time, in the compute dtype, and again for the backward pass; each gradient is
    reduce-scattered in float32. Norm gains and other vectors are so small that latency dominates:
    those of all layers are gathered together.

    A gather stands in the loop's body, where the compiler moves it beside the layer before
    (docs/guides/overlap.md). A loop of our own that gathered one layer ahead, with barriers and a
    VJP, was slower on TPUs: on v5p `ladder-jax overlap --model llama-3-70b --layers 4 --phase train
    --residual ladder --fsdp 2` says 89.6 M cycles, and said 120.4 M.

    dims: a tree of the arrays' dimensions, such as "DNH"; an array stays as it is where these have
    no D. Gradients are summed over the ranks of the axis in float32.
    """
    return jax.tree.map(
        lambda dims, a: _unsharded(a, dims, dtype) if "D" in dims else a, dims, params
    )


def dims_in_turn(dims: Any) -> tuple[Any, Any]:
    """Of stacked layers' dimensions, what is gathered of all layers at once, the vectors ("LD"),
    and what of each.
    """
    vectors = jax.tree.map(lambda dims: dims if dims == "LD" else "", dims)
    return vectors, jax.tree.map(lambda dims: "" if dims == "LD" else dims.removeprefix("L"), dims)


def all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A checkpoint policy: everything is kept but gathered matrices, which the backward pass
    gathers again.

    A policy by names does not see through the gather's own gradient rule.
    """
    if primitive.name != "custom_vjp_call":
        return True
    return not any(
        one.primitive.name.startswith("all_gather") for one in parameters["call_jaxpr"].eqns
    )


def _unsharded(array, dims, dtype):
    # norm gains multiply in float32
    stays = len(dims.removeprefix("L")) == 1 or dims.endswith(ROUTER)
    return _gather(array, dims.index("D"), jnp.dtype(array.dtype if stays else dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(share, axis, dtype):
    with jax.named_scope(GATHER):
        return all_gather(share.astype(dtype), (FSDP,), dimension=axis)


def _give_back(gradient, axis):
    with jax.named_scope(SCATTER):
        return reduce_scatter(gradient.astype(jnp.float32), (FSDP,), dimension=axis)


_gather.defvjp(
    lambda share, axis, dtype: (_gather(share, axis, dtype), jnp.zeros((), share.dtype)),
    lambda axis, dtype, like, gradient: (_give_back(gradient, axis).astype(like.dtype),),
)


def unchecked(function: Callable) -> Callable:
    """`function` of arrays on arguments that it sees without varying types; not differentiable.

    Pallas and cuDNN kernels do not know these types, so they run in a `shard_map` that does not
    check them and has no axis left to split. The results vary where any argument does.
    """

    def untyped(x):
        # The type comes in with the argument, and goes with any operation, of which this one is
        # free.
        return lax.squeeze(lax.expand_dims(x, (0,)), (0,))

    def call(*args):
        axes = frozenset.union(*map(varying, jax.tree.leaves(args)))
        vary = functools.partial(pvary, axes=axes)
        local = jax.shard_map(
            lambda *inner: function(*jax.tree.map(untyped, inner)),
            axis_names=set(),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        with jax.enable_x64(False):  # with which jax's kernels cannot be traced
            return jax.tree.map(vary, local(*jax.tree.map(vary, args)))

    return call


def differentiable(kernel: Callable, *, fixed: int = 0) -> Callable:
    """`unchecked(kernel)` with the kernel's own gradient.

    fixed: how many arguments, the last ones, have no gradient; all others are of floating point.

    jax cannot type a gradient through the inner `shard_map`, so forward and backward are one each:
    the kernel's pull-back itself is the residual, and nothing is computed twice.
    """

    @jax.custom_vjp
    def call(*args):
        return unchecked(kernel)(*args)

    def forward(*args):
        def with_pull_back(*args):
            count = len(args) - fixed
            return jax.vjp(lambda *moving: kernel(*moving, *args[count:]), *args[:count])

        return unchecked(with_pull_back)(*args)

    def backward(pull_back, gradient):
        gradients = unchecked(lambda pull_back, gradient: pull_back(gradient))(pull_back, gradient)
        return *gradients, *(None,) * fixed

    call.defvjp(forward, backward)

    # so that each gradient has its argument's type
    return lambda *args: call(*varying_alike(*args))
