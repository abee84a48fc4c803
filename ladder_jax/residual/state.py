"""What flows from sublayer to sublayer."""

import dataclasses
from collections.abc import Callable, Sequence

import jax

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


def compute(x: jax.Array, which: tuple[int, ...], sublayers: Sequence[Sublayer]) -> jax.Array:
    """This rank's partial sum of those sublayers."""
    first, *rest = (sublayers[index](x) for index in which)
    return sum(rest, first)


def add(stream: jax.Array, sums: Sequence[jax.Array | None]) -> jax.Array:
    """In the stream's dtype; None is zero."""
    for addend in sums:
        if addend is not None:
            stream = stream + addend.astype(stream.dtype)
    return stream
