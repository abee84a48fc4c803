"""Loss and gradients on every mesh, under every setting: those of the reference, to float32's
rounding.
"""

import itertools

import pytest

from ladder_jax.config import CollectiveMatmul, Loop, Remat
from tests import cases, covering, reference

TOPOLOGIES = ("standard", "ladder", "ladder-fresh", "parallel-ladder")
ROWS = 16
LENGTH = 8
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
RINGS = dict(sequence_parallel=True, collective_matmul=CollectiveMatmul.RING)
EVERY = dict(sequence_parallel=True, loop=Loop.UNROLLED, accumulate=2, z_loss=1e-2, loss_chunk=12)
TOGETHER = covering.marked(
    [
        ("standard", dict(**RINGS, loop=Loop.UNROLLED, remat=Remat.SAVE_MATMULS, accumulate=2)),
        ("hybrid-last-2", dict(loop=Loop.UNROLLED)),
        ("ladder", dict(sequence_parallel=True, loop=Loop.UNROLLED, remat=Remat.FULL)),
        ("ladder", dict(loop=Loop.UNROLLED, remat=Remat.FULL, accumulate=2)),
        ("ladder", dict(loop=Loop.UNROLLED, remat=Remat.SAVE_MATMULS, loss_chunk=12)),
        ("ladder", dict(remat=Remat.FULL, accumulate=2, loss_chunk=12)),
    ],
    chosen=[
        # every two departures, and a scan
        ("ladder", dict(**EVERY, remat=Remat.FULL)),
        ("ladder", dict(**EVERY, remat=Remat.SAVE_MATMULS)),
        ("ladder", dict(sequence_parallel=True, remat=Remat.SAVE_MATMULS, accumulate=2)),
        # weights that are gathered a layer ahead, and a batch in parts
        ("standard", dict(**RINGS, remat=Remat.SAVE_MATMULS, accumulate=2)),
        # in a scan a layer, another, and a run of two
        ("hybrid-last-2", dict()),
    ],
)


def with_z_loss(params, tokens, shape):
    sums = reference.logsumexp(reference.logits(params, tokens[:, :-1], shape))
    return reference.loss(params, tokens, shape) + 1e-2 * (sums**2).mean()


def check(name, mesh, settings):
    form = dict(num_layers=4 if name.startswith("hybrid") else 2, **mesh)
    function = with_z_loss if "z_loss" in settings else reference.loss
    shape = dict(shape_BT=(ROWS, LENGTH + 1), function=function)
    cases.check_case(name, form, **shape, **settings)


@pytest.mark.parametrize("name, mesh, departure", CASES)
def test_every_mesh_and_departure(name, mesh, departure):
    check(name, MESHES[mesh], DEPARTURES[departure])


@pytest.mark.parametrize("name, settings", TOGETHER)
def test_departures_together(name, settings):
    check(name, dict(data=2, fsdp=2, tensor=2), settings)
