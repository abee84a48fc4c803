"""What a model is made of and called with: one line for what is another model's, or outside the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ladder_jax import nn, parallel
from ladder_jax.errors import UserError
from tests import cases

CONFIG = cases.model("ladder", num_layers=1, d_model=16, num_heads=2, num_kv_heads=2, d_ff=16)
TOKENS = cases.tokens((2, 6))


def params_of(config=CONFIG, *, tensor=1):
    return cases.parameters(nn.define(config, mesh=parallel.make_mesh(tensor=tensor)))


def without(*path):
    """A model's parameters, the one at `path` left out, or the module."""
    params = params_of()
    below = params
    for name in path[:-1]:
        below = below[name]
    del below[path[-1]]
    return params


def other(**changes):
    return params_of(
        cases.model("ladder", **{**dict(num_layers=1, d_model=16, num_heads=2, num_kv_heads=2, d_ff=16), **changes})
    )


MISTAKES = {
    "two layers": (
        other(num_layers=2),
        "params.layers.attention.key has the shape (2, 16, 2, 8), and this model needs (1, ",
    ),
    "a wider stream": (other(d_model=32, head_dim=8), "has the shape (256, 32), and this model needs (256, 16)"),
    "more heads": (other(num_heads=4, num_kv_heads=4, head_dim=8), "params.layers.attention"),
    "a wider MLP": (other(d_ff=32), "params.layers.mlp"),
    "a larger vocabulary": (other(vocab_size=300), "needs (256, 16)"),
    "no head": (
        other(tie_embeddings=True),
        "params.head is missing: this model has embedding, layers, final_norm, head",
    ),
    "biases": (other(biases="all"), "unknown parameter 'params.layers.attention."),
    "no module": (without("layers"), "params.layers is missing: this model has embedding"),
    "no array": (without("layers", "mlp", "up"), "params.layers.mlp.up is missing: this model has"),
    "misspelt": (
        {**params_of(), "final_nrm": 1},
        "unknown parameter 'params.final_nrm'; did you mean 'params.final_norm'?",
    ),
    "no dict": ([1, 2], "params must be a dict with embedding, layers, final_norm, head, not a list"),
    "an array for a module": (
        {**params_of(), "head": np.zeros(3)},
        "params.head must be a dict with table, not a ndarray",
    ),
    "a module for an array": ({**params_of(), "head": {"table": {}}}, "params.head.table has the shape None"),
}


@pytest.mark.parametrize("params, message", MISTAKES.values(), ids=MISTAKES)
def test_another_models_parameters_are_refused(params, message):
    with pytest.raises(UserError) as caught:
        nn.Transformer(CONFIG, params=params)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_and_by_the_compiled_function():
    """Two layers' arrays ran as one layer's, truncated."""
    program = nn.compiled_logits(nn.define(CONFIG, mesh=parallel.make_mesh()))
    with pytest.raises(UserError, match="params.layers.attention.key has the shape"):
        program(other(num_layers=2), TOKENS)
    assert np.isfinite(program(params_of(), TOKENS)).all()


def test_what_no_model_is_made_of():
    for wrong in ("tiny", {"num_layers": 1}, None):
        with pytest.raises(UserError, match="a Transformer takes a ModelConfig, such as preset"):
            nn.Transformer(wrong, rngs=nnx.Rngs(0))


def test_its_own_parameters_in_any_form():
    """On the host or a device, in another dtype, as Flax's State, or only shapes: to lower for absent hardware."""
    model = nn.Transformer(CONFIG, params=params_of())
    for params in (model.params, jax.tree.map(lambda a: a.astype(jnp.bfloat16), model.params), nnx.state(model)):
        assert np.isfinite(nn.Transformer(CONFIG, params=params)(TOKENS)).all()
    abstract = nn.Transformer(CONFIG, params=model.definition.abstract)
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(abstract))) == jax.tree.map(jnp.shape, model.params)


def test_tokens_outside_the_vocabulary():
    """Refused where they are known. A trace knows none."""
    model = nn.Transformer(CONFIG, params=params_of())
    for wrong in (251, 300, -1):
        for kind in (np.asarray, jnp.asarray, np.int64, lambda tokens: tokens.tolist()):
            with pytest.raises(UserError, match=rf"token {wrong} is not in the vocabulary of 251 \(0 to 250\)"):
                model(kind(np.where(np.arange(12).reshape(2, 6) == 7, wrong, TOKENS)))
    with pytest.raises(UserError, match="token 4294967296 is not in"):
        model(np.full((2, 6), 2**32))
    for wrong in (TOKENS + 0.5, jnp.ones((2, 6)), TOKENS > 3):
        with pytest.raises(UserError, match="tokens must be integers, not (float64|float32|bool)"):
            model(wrong)
    with pytest.raises(UserError, match=r"must be \[B, T\]"):
        model(TOKENS[0])
    edge = np.where(TOKENS > 100, 250, 0)
    assert np.isfinite(jax.jit(model)(edge + 251)).all()
    assert np.array_equal(model(edge.astype(np.int64)), model(edge.tolist()))
