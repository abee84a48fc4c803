"""Loss and gradients on every mesh, under every setting: those of one device, to float32 rounding.

One device itself is held to an independent reference in test_numerics.py.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

from ladder_jax.config import CollectiveMatmul, Loop, Remat
from ladder_jax.train.gradients import loss_and_gradients
from tests import cases, covering

TOPOLOGIES = ("standard", "ladder", "ladder-fresh", "parallel-ladder")
ROWS, LENGTH = 16, 8
MESHES = {
    f"{data}x{fsdp}x{8 // data // fsdp}": dict(data=data, fsdp=fsdp, tensor=8 // data // fsdp)
    for data, fsdp in itertools.product((1, 2, 4, 8), repeat=2)
    if data * fsdp <= 8
}
DEPARTURES = {
    "none": {},
    "unrolled": dict(loop=Loop.UNROLLED),
    "sequence parallel": dict(sequence_parallel=True),
    "accumulated": dict(accumulate=2),
    # on 4 ranks of the batch: 3 positions of 4 rows, of 8
    "z-loss, in chunks": dict(z_loss=1e-2, loss_chunk=12),
    **{f"remat {remat.value}": dict(remat=remat) for remat in Remat if remat is not Remat.NONE},
}
CASES = covering.marked(
    [
        *itertools.product(TOPOLOGIES, MESHES, ["none"]),
        *itertools.product(TOPOLOGIES, ["1x4x2"], DEPARTURES),
    ],
    chosen=[  # one whose all-reduce waits, and one whose ranks differ
        *covering.array(["ladder"], MESHES, DEPARTURES, pairs=[(0, 1), (0, 2)], even=[2]),
        ("ladder-fresh", "1x2x4", "sequence parallel"),
    ],
)
PAIRS = [
    dict(sequence_parallel=True, loop=Loop.UNROLLED, remat=Remat.FULL),
    dict(sequence_parallel=True, remat=Remat.SAVE_MATMULS, accumulate=2, loss_chunk=12),
    dict(loop=Loop.UNROLLED, remat=Remat.FULL, accumulate=2),
    dict(loop=Loop.UNROLLED, remat=Remat.SAVE_MATMULS, loss_chunk=12),
    dict(remat=Remat.FULL, accumulate=2, loss_chunk=12),
]


def run(name, *, mesh, **settings):
    ranks = {} if "tensor" in mesh and mesh["tensor"] > 1 else dict(ranks=mesh.pop("ranks", None))
    definition = cases.define(name, num_layers=2, **mesh, **ranks)
    params = cases.placed(definition)
    batch = jax.device_put(cases.tokens((ROWS, LENGTH + 1)), definition.layout.sharding("BT"))
    loss, gradients = jax.jit(loss_and_gradients(definition, **settings))(params, batch)
    for array, shape in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(definition.abstract), strict=True
    ):
        assert array.dtype == np.float32 and array.sharding.is_equivalent_to(
            shape.sharding, array.ndim
        )
    return definition, (float(loss), jax.tree.map(np.asarray, gradients))


@functools.cache
def one_device(name, *, ranks, z_loss):
    """Plainly: a scan, nothing recomputed, all rows at once."""
    return run(name, mesh=dict(ranks=ranks), z_loss=z_loss)[1]


def check(name, *, mesh, **settings):
    ranks = mesh["tensor"] if name in cases.DEPEND_ON_RANKS else None
    expected = one_device(name, ranks=ranks, z_loss=settings.get("z_loss", 0.0))
    definition, found = run(name, mesh=dict(mesh), **settings)
    cases.assert_close(found, expected, definition=definition)


@pytest.mark.parametrize("name, mesh, departure", CASES)
def test_every_mesh_and_departure(name, mesh, departure):
    check(name, mesh=MESHES[mesh], **DEPARTURES[departure])


@pytest.mark.parametrize("settings", PAIRS, ids=str)
def test_departures_together(settings):
    check("ladder", mesh=dict(data=2, fsdp=2, tensor=2), **settings)


@pytest.mark.parametrize("loop", [Loop.SCAN, pytest.param(Loop.UNROLLED, marks=pytest.mark.full)])
def test_rings_beside_the_other_axes(loop):
    """Weights that are gathered a layer ahead, and a batch in parts."""
    rings = dict(sequence_parallel=True, collective_matmul=CollectiveMatmul.RING)
    mesh = dict(data=2, fsdp=2, tensor=2)
    check("standard", mesh=mesh, **rings, loop=loop, remat=Remat.SAVE_MATMULS, accumulate=2)
