"""The package's front door."""

import jax
import numpy as np
import pytest
from flax import nnx

import ladder_jax


def test_public_names():
    for name in ladder_jax.__all__:
        assert getattr(ladder_jax, name) is not None
        assert name in dir(ladder_jax)
    with pytest.raises(AttributeError, match="no attribute 'Transfomer'"):
        ladder_jax.Transfomer  # noqa: B018


def test_a_model_shows_its_shardings():
    model = ladder_jax.Transformer(
        ladder_jax.preset("tiny"), rngs=nnx.Rngs(0), mesh=ladder_jax.make_mesh(data=2, tensor=4)
    )
    query = model.layers.attention.query
    assert query[...].shape == (4, 128, 8, 16)
    assert query[...].sharding.spec == jax.sharding.PartitionSpec(None, None, "tensor", None)
    assert {shard.data.shape for shard in query[...].addressable_shards} == {(4, 128, 2, 16)}
    with pytest.raises(ladder_jax.errors.UserError, match="divisible by 2"):
        model(np.zeros((3, 4), np.int32))
