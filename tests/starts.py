"""A checkpoint to start inference from."""

import numpy as np

from ladder_jax import checkpoint
from ladder_jax.config import Dtype, MeshConfig, RunConfig, TrainConfig
from tests import cases

BFLOAT16 = dict(dtype=Dtype.BFLOAT16, residual_dtype=Dtype.BFLOAT16)
# large matrices beside a short cache
WIDE = dict(num_layers=6, d_model=128, d_ff=512, vocab_size=512, **BFLOAT16)


def save(folder, definition, *, train=None, **more):
    """A checkpoint of random values; returns these. train, more: of its RunConfig."""
    params = cases.parameters(definition)
    mesh = MeshConfig(tensor=definition.layout.mesh.size)
    written = checkpoint.Store(
        folder,
        config=RunConfig(
            definition.config, mesh, TrainConfig(sequence=64, **(train or {})), **more
        ),
    )
    written.save(1, params=cases.place(params, definition), optimizer={"count": np.zeros(())})
    written.close()
    assert written.failure() is None
    return params
