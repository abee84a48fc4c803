"""Where top-k, top-p and min-p cut, read from each rank's largest scores: one gather, where that says it.

All three keep what is at least as large as some score, so the largest of their three bounds is the cut. Every rank
sends its `COUNT` largest scores: of what is above the least of a full list (the floor below), nothing is missing.
A row whose cut lies deeper, as of a top-k beyond COUNT or a top-p of a flat distribution, has it found digit by
digit (see cuts.py): 8 collectives more for top-k, 10 for top-p, and 1.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax.decode import cuts
from ladder_jax.parallel import all_ranks, anywhere
from ladder_jax.parallel.collectives import CHOICE

if TYPE_CHECKING:
    from ladder_jax.decode.sampling import Asked, Settings

COUNT = 128  # of each rank's scores: 64 KiB for 16 rows over 8 ranks


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """The same on all ranks.

    values: [B, C], falling. floor: [B]; of the scores above it, all are here, and none below -inf.
    mass: [B], the sum of exp(score - largest) over the whole vocabulary.
    """

    values: jax.Array
    floor: jax.Array
    mass: jax.Array


@jax.named_scope(CHOICE)
def cut(
    scores_BV: jax.Array, *, settings: Settings, asked: Asked, axes: tuple[str, ...], count: int = COUNT
) -> jax.Array:
    """This rank's share of the scores, [B, V/ranks] float32, with what each row's cuts leave out at -inf.

    As `cuts.top_k`, `top_p` and `min_p` one after another. One collective, and where rows are split over the mesh
    one more; those of `cuts` where any row needs them.
    """
    found = _gather(scores_BV, axes=axes, count=count)
    lowest, deeper = _lowest(found, settings)
    keep = lambda x: jnp.where(x >= lowest[:, None], x, -jnp.inf)
    digits = lambda x: _digits(x, settings=settings, asked=asked, axes=axes)
    (any_deeper,) = anywhere(deeper & (settings.temperature > 0))
    return lax.cond(any_deeper, digits, keep, scores_BV)


def _digits(scores_BV: jax.Array, *, settings: Settings, asked: Asked, axes: tuple[str, ...]) -> jax.Array:
    drawn = scores_BV
    drawn = lax.cond(asked.top_k, lambda x: cuts.top_k(x, settings.top_k, axes=axes), lambda x: x, drawn)
    drawn = lax.cond(asked.top_p, lambda x: cuts.top_p(x, settings.top_p, axes=axes), lambda x: x, drawn)
    return cuts.min_p(drawn, settings.min_p, axes=axes)


def _gather(scores_BV: jax.Array, *, axes: tuple[str, ...], count: int) -> _Candidates:
    size = scores_BV.shape[-1]
    own, _ = lax.top_k(scores_BV, min(count, size))
    finite = jnp.where(jnp.isneginf(own[:, 0]), 0, own[:, 0])  # a rank may hold nothing but padding
    mass = jnp.sum(jnp.exp(scores_BV - finite[:, None]), axis=-1)
    sent = all_ranks(jnp.concatenate([own, mass[:, None]], axis=-1), axes)  # [ranks, B, count + 1]
    lists, masses = sent[..., :-1], sent[..., -1]
    largest = jnp.max(lists[..., 0], axis=0)
    whole = jnp.full_like(largest, -jnp.inf)
    return _Candidates(
        values=jnp.sort(jnp.moveaxis(lists, 0, 1).reshape(len(scores_BV), -1), axis=-1, descending=True),
        floor=jnp.max(lists[..., -1], axis=0) if count < size else whole,
        mass=jnp.sum(masses * jnp.exp(lists[..., 0] - largest[None]), axis=0),
    )


def _lowest(found: _Candidates, settings: Settings) -> tuple[jax.Array, jax.Array]:
    """The lowest score that each row keeps, [B], and whether that lies deeper than the candidates say, [B] bool.

    What is no number is not deeper: there is nothing to find.
    """
    values, floor, largest = found.values, found.floor, found.values[:, 0]
    count = values.shape[-1]
    at = lambda index: jnp.take_along_axis(values, jnp.clip(index, 0, count - 1)[:, None], axis=-1)[:, 0]

    has_k = settings.top_k > 0
    beyond = has_k & (settings.top_k > count)  # all of them, if these are all
    kth = jnp.where(has_k & ~beyond, at(settings.top_k - 1), -jnp.inf)
    deeper_k = (kth < floor) & has_k

    # Of what top-k leaves: its equals may be elsewhere, too, where it is the floor.
    mass = jnp.where(values >= kth[:, None], jnp.exp(values - largest[:, None]), 0)
    total = jnp.where(has_k & ~beyond, jnp.sum(mass, axis=-1), found.mass)
    # The largest has mass 1 of a total of 1 or more: any positive mass, however small p is, wants it.
    wanted = jnp.maximum(settings.top_p * total, jnp.finfo(jnp.float32).tiny)
    enough = jnp.cumsum(mass, axis=-1) >= wanted[:, None]
    has_p, reached = settings.top_p < 1, jnp.any(enough, axis=-1)
    # Rounding in the last places of the sums can only keep more.
    nucleus = jnp.where(has_p, jnp.where(reached, at(jnp.argmax(enough, axis=-1)), kth), -jnp.inf)
    unsure_total = has_k & (kth <= floor) & ~jnp.isneginf(floor)
    deeper_p = has_p & ((nucleus < floor) | unsure_total)

    probable = largest + jnp.minimum(jnp.log(settings.min_p), 0)
    return jnp.maximum(jnp.maximum(kth, nucleus), probable), deeper_k | deeper_p
