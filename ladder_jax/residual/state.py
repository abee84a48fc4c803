"""What flows from sublayer to sublayer."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax import lax

from ladder_jax.errors import UserError, unknown
from ladder_jax.parallel.collectives import varying

Sublayer = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What flows from sublayer to sublayer; every array is [B, T, D].

    residual: the stream, equal on all tensor ranks (this rank's own in "no-communication").
    sums: all-reduced outputs, oldest first, that some later sublayer must not read yet.
    partial: what this rank has still to reduce. In place of a sum or a partial, None is zero.
    local: in "desync" between two reductions, this rank's own stream.
    entered: with sequence parallelism, the next step's input (see sequence.py).
    """

    residual: jax.Array
    sums: tuple[jax.Array | None, ...] = ()
    partial: jax.Array | None = None
    local: jax.Array | None = None
    entered: jax.Array | None = None


def compute(x: jax.Array, which: tuple[int, ...], sublayers: Sequence[Sublayer], *, axes: tuple[str, ...]) -> jax.Array:
    """This rank's partial sum of those sublayers.

    Raises UserError for one that returns the whole sum: reduced again, it would count once a rank. Types tell, where
    jax checks them (`check_vma`): the input may differ between ranks, and such an output may not.
    """
    first, *rest = (_partial(sublayers[index], x, axes) for index in which)
    return sum(rest, first)


def check_axes(axes: tuple[str, ...]) -> None:
    """Raises UserError for a name in place of a tuple, and for axes of which there are no ranks here."""
    if isinstance(axes, str):
        raise UserError(f"axes must be a tuple of the mesh's axes, as in ({axes!r},), not {axes!r}")
    for axis in axes:
        try:
            lax.axis_size(axis)
        except NameError:
            known = sorted(jax.sharding.get_abstract_mesh().manual_axes)
            if known:
                raise unknown("mesh axis", axis, known) from None
            raise UserError(f"there are no ranks of {axis!r} here: call it inside jax.shard_map") from None


def _partial(sublayer: Sublayer, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    out = sublayer(x)
    reduced = (varying(x) & frozenset(axes)) - varying(out)
    if reduced:
        raise UserError(
            f"a sublayer's output is the same on all ranks of {', '.join(sorted(reduced))}, so they would be counted"
            " once each: return this rank's partial sum, without psum (a bias belongs to one rank only)"
        )
    return out


def add(stream: jax.Array, sums: Sequence[jax.Array | None]) -> jax.Array:
    """In the stream's dtype; None is zero."""
    for addend in sums:
        if addend is not None:
            stream = stream + addend.astype(stream.dtype)
    return stream
