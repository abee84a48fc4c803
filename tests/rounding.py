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

import jax
import jax.numpy as jnp
import numpy as np

from tests import reference

SAMPLES = 8
STUDENT = 5.041  # its two-sided 0.999 quantile for 8 degrees of freedom
FAST = {"xla_backend_optimization_level": 2}  # these programs run for longer than they compile
PLACES = 256  # more would begin again with the first


def gradients(params, tokens, shape, *, parts):
    """(the gradient in float64, SAMPLES gradients with rounding), means over as many `parts` of a
    batch's rows.

    tokens: [B, T+1]. A part is what one shard of a batch computes at once: its gradient is rounded
        for itself.
    """
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        wide, single = (
            jax.tree.map(lambda a: jnp.asarray(a, dtype), params)
            for dtype in (jnp.float64, jnp.float32)
        )
        parts = jnp.asarray(tokens).reshape(parts, -1, tokens.shape[1])
        exact = jax.jit(lambda p: _mean(p, parts, shape), compiler_options=FAST)(wide)
        sample = jax.jit(
            lambda p, factors: _mean(p, parts, dataclasses.replace(shape, rounds=Places(factors))),
            compiler_options=FAST,
        )
        rng = np.random.default_rng(0)
        factors = [2.0 ** rng.random((PLACES, 2), np.float32) for _ in range(SAMPLES)]
        return jax.tree.map(np.asarray, (exact, [sample(single, some) for some in factors]))


def _mean(params, parts, shape):
    total = jax.lax.map(lambda part: jax.grad(reference.loss)(params, part, _again(shape)), parts)
    return jax.tree.map(lambda g: g.mean(0), total)


def _again(shape):
    return (
        dataclasses.replace(shape, rounds=Places(shape.rounds.factors))
        if isinstance(shape.rounds, Places)
        else shape
    )


class Places:
    """Rounds at each place to the grid of `dtype` by its own two `factors` [PLACES, 2], forward and
    backward.
    """

    def __init__(self, factors, dtype=jnp.bfloat16):
        self.factors, self.dtype, self.count = factors, dtype, 0

    def __call__(self, y, forward=True, backward=True):
        at, self.count = self.factors[self.count % len(self.factors)], self.count + 1
        return _rounded(y, at, (forward, backward), self.dtype)


def _to_grid(y, factor, dtype):
    return (y * factor).astype(dtype).astype(y.dtype) / factor


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rounded(y, factors, where, dtype):
    return _to_grid(y, factors[0], dtype) if where[0] else y


_rounded.defvjp(
    lambda y, factors, where, dtype: (_rounded(y, factors, where, dtype), factors),
    lambda where, dtype, factors, g: (
        _to_grid(g, factors[1], dtype) if where[1] else g,
        jnp.zeros_like(factors),
    ),
)
