"""After a refit, a few steps of gradient descent towards the original's predictions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from experiments.refit.plan import Way
from ladder_jax import nn, parallel, pretrained, residual
from ladder_jax.pretrained import Source
from ladder_jax.pretrained.refit.projections import READERS
from ladder_jax.pretrained.source import Stored

RATE = 1e-4
FITTED = {f"layers/{sublayer}/{name}" for sublayer, names in READERS.items() for name in names}
"""The stacks [L, ...] of which a refit changes the converted layers."""


def trained(source: Source, original: Source, *, rows: np.ndarray, way: Way) -> Source:
    """`source` after a step of Adam (no decay, a constant rate) on each of `rows` [n, T].

    original: the teacher. way: TRAINED for the fitted projections of the converted layers alone, DISTILLED for all.
    """
    mesh = parallel.make_mesh()
    student, teacher = (nn.define(one.model, mesh=mesh) for one in (source, original))
    params, frozen = (_flat(pretrained.load(one, mesh=mesh)) for one in (source, original))
    names = sorted(FITTED & set(params)) if way is Way.TRAINED else sorted(params)
    chosen, optimizer = {name: params.pop(name) for name in names}, optax.adam(RATE)
    converted = np.any(np.reshape(residual.of_model(source.model).delays, (-1, 2)), axis=1)

    def masked(name: str, gradient: jax.Array) -> jax.Array:
        if way is Way.DISTILLED:
            return gradient
        return gradient * converted.reshape(-1, *[1] * (gradient.ndim - 1))

    @jax.jit
    def step(chosen, state, params, frozen, row):
        target = jax.nn.log_softmax(nn.compiled_logits(teacher)(_nested(frozen), row))

        def divergence(chosen):
            scores = jax.nn.log_softmax(nn.compiled_logits(student)(_nested({**params, **chosen}), row))
            return jnp.mean(jnp.sum(jnp.exp(target) * (target - scores), axis=-1))

        value, gradients = jax.value_and_grad(divergence)(chosen)
        updates, state = optimizer.update({name: masked(name, g) for name, g in gradients.items()}, state)
        return optax.apply_updates(chosen, updates), state, value

    state = jax.jit(optimizer.init)(chosen)
    for row in rows:
        chosen, state, value = step(chosen, state, params, frozen, row[None])
        print(f"  divergence {float(value):.4f}", flush=True)
    changed = {}
    for key, stored in source.arrays.items():
        if key.name in chosen:
            array = np.asarray(chosen[key.name] if key.layer is None else chosen[key.name][key.layer])
            array = array[tuple(map(slice, stored.shape))]  # without the vocabulary's padding
            changed[key] = Stored(stored.shape, array.dtype, lambda array=array: array)
    return dataclasses.replace(source, arrays={**source.arrays, **changed})


def _flat(params: nn.Params) -> dict[str, jax.Array]:
    return traverse_util.flatten_dict(params, sep="/")


def _nested(params: dict[str, jax.Array]) -> nn.Params:
    return traverse_util.unflatten_dict(params, sep="/")
