"""What bfloat16 may do to a gradient: the float64 reference, with every value that is stored in
bfloat16 rounded.

The unit roundoff is u = 2^-8: bfloat16 has 8 bits of significand, the leading one among them, so
the nearest value is at most 2^-8 of a number away. A computation in bfloat16 rounds at the places
that `reference.Shape.rounds` marks: each matrix and each row that is looked up, each matmul's and
each elementwise operation's output, each sum in the residual stream, each payload of an all-reduce
(a rank's partial, and the sum); and at the same places backward, where gradients are what is
rounded. Everything else is float32 (u = 2^-24), above all the sums: over D, F or H in a matmul,
over keys in attention, and over all positions in a parameter's gradient. What they add,
sqrt(16,384) 2^-24 = 2^-17 of their terms' size, is below a hundredth of one rounding in bfloat16,
and left out.

To first order, the error of a gradient is the sum over those places of (its derivative by the value
there) x (the rounding there). No norm of that is known in advance: sums cancel, and values that are
alike are rounded alike, as are the inputs of the first layers at all positions with one token. So
it is sampled, as stochastic arithmetic does (Vignes 1993, "A stochastic arithmetic for reliable
scientific computation"): each place rounds to bfloat16's grid scaled by a random factor in [1, 2),
by which no rounding exceeds u, equal values still round equally, and the samples' roundings are
independent. The real computation is one more sample, with all factors 1. Its error's norm exceeds t
x the root mean square of SAMPLES samples' with probability 0.001, if all of the error is one normal
mode (then the ratio is Student's t with SAMPLES degrees of freedom), and far more rarely if it is
made of many.
"""

import dataclasses
import functools

import autograd.numpy as np
import jax
import ml_dtypes
from autograd.extend import defvjp, primitive

from tests import reference

SAMPLES = 8
STUDENT = 5.041  # its two-sided 0.999 quantile for 8 degrees of freedom
PLACES = 256  # more would begin again with the first


def gradients(params, tokens, shape, *, parts):
    """(the gradient, SAMPLES gradients with rounding), means over as many `parts` of a batch's
    rows.

    tokens: [B, T+1]. A part is what one shard of a batch computes at once: its gradient is rounded
        for itself.
    """
    parts = np.split(tokens, parts)
    samples = [_mean(params, parts, shape, rounds) for rounds in rounders()]
    return _mean(params, parts, shape, lambda: reference.exactly), samples


def rounders(dtype=ml_dtypes.bfloat16):
    """SAMPLES functions: each makes `Places` with factors of its own, which begin with the first."""
    rng = np.random.default_rng(0)
    draws = [2.0 ** rng.random((PLACES, 2)) for _ in range(SAMPLES)]
    return [functools.partial(Places, factors, dtype) for factors in draws]


def _mean(params, parts, shape, rounds):
    """rounds: makes what rounds in one part."""
    each = []
    for part in parts:
        of = dataclasses.replace(shape, rounds=rounds())
        _, gradient = reference.evaluate(reference.loss, params, part, of, gradient=True)
        each.append(gradient)
    return jax.tree.map(lambda *slopes: sum(slopes) / len(slopes), *each)


class Places:
    """Rounds at each place to the grid of `dtype` by its own two `factors` [PLACES, 2], forward and
    backward.
    """

    def __init__(self, factors, dtype):
        self.factors = factors
        self.dtype = dtype
        self.count = 0

    def __call__(self, y, forward=True, backward=True):
        at = self.factors[self.count % len(self.factors)]
        self.count += 1
        return _rounded(y, at, (forward, backward), self.dtype)


def _to_grid(y, factor, dtype):
    return (y * factor).astype(dtype).astype(y.dtype) / factor


@primitive
def _rounded(y, factors, where, dtype):
    return _to_grid(y, factors[0], dtype) if where[0] else y


def _rounded_backward(rounded, y, factors, where, dtype):
    return lambda slope: _to_grid(slope, factors[1], dtype) if where[1] else slope


defvjp(_rounded, _rounded_backward, argnums=(0,))
