"""Experts whose rows the tensor ranks exchange: values and gradients against the dense loop in float64, capacity with
dropped rows against a loop over tokens, and what is refused."""

import jax
import pytest

from ladder_jax import nn, parallel, train
from ladder_jax.config import ExpertParallelism, Loop, Remat
from tests import cases, covering, experts

# data x fsdp x tensor
MESHES = {
    "tensor-2": (1, 1, 2),
    "tensor-4": (1, 1, 4),
    "data-2-tensor-4": (2, 1, 4),
    "tensor-8": (1, 1, 8),
    "fsdp-2-tensor-4": (1, 2, 4),
    "all-2": (2, 2, 2),
}
TOPOLOGIES = [name for name in experts.TOPOLOGIES if not name.startswith("parallel")]
QUICK = [
    ("standard", "shared", "tensor-8", Loop.SCAN, Remat.NONE),
    ("ladder", "routed", "data-2-tensor-4", Loop.UNROLLED, Remat.SAVE_MATMULS),
    ("farskip", "ungated", "fsdp-2-tensor-4", Loop.SCAN, Remat.FULL),
]
SETTINGS = covering.marked(covering.array(TOPOLOGIES, experts.KINDS, MESHES, Loop, Remat), chosen=QUICK)


def define(name: str, kind: str, *, capacity: float | None = None, axes=(1, 1, 4), **changes) -> nn.ModelDef:
    """With a capacity that holds every row, unless given."""
    moe = experts.KINDS[kind]
    moe = {**moe, "capacity": moe["experts"] / moe["top_k"] if capacity is None else capacity}
    mesh = parallel.make_mesh(**dict(zip(("data", "fsdp", "tensor"), axes)))
    return nn.define(experts.model(name, kind, moe=moe, **changes), mesh=mesh, experts=ExpertParallelism.EXCHANGE)


@pytest.mark.parametrize("name, kind, mesh, loop, remat", SETTINGS)
def test_gradients(name, kind, mesh, loop, remat):
    """Without drops, the loss and every gradient are those of the dense loop, the routers' losses among them."""
    definition = define(name, kind, axes=MESHES[mesh])
    params = cases.place(cases.parameters(definition), definition)
    settings = dict(loop=loop, remat=remat, sequence_parallel=True)
    losses = dict(load_balance=experts.LOAD_BALANCE, router_z_loss=experts.Z_LOSS)
    program = jax.jit(train.loss_and_gradients(definition, **settings, **losses))
    text = program.lower(params, experts.tokens()).compile().as_text()
    assert "all-to-all" in text
    loss, gradients = program(params, experts.tokens())
    expected = experts.dense_gradients(name, kind)
    limit = cases.bound(definition.config, passes=2)
    assert cases.error(loss, expected[0]) < limit
    errors = experts.errors(gradients, expected[1])
    assert max(jax.tree.leaves(errors)) < limit, errors
