"""Each sublayer's input holds the outputs that its topology's delays name; and what a topology says
of itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ladder_jax import config, parallel, residual

LAYERS = 4
TOPOLOGIES = {
    **{
        name: residual.topology(name, num_layers=LAYERS)
        for name in (*config.RESIDUALS, "ladder-3", "desync-3")
    },
    **{
        f"{name}, {which}": residual.topology(name, num_layers=LAYERS, ladder_layers=which)
        for name in ("ladder", "ladder-fresh", "parallel-ladder")
        for which in ("2", "0,2")
        if (name, which) != ("parallel-ladder", "0,2")  # reads the middle of a joint layer
    },
}


def inputs(topology):
    """What the sublayers read on rank 0 of 2, [2L, 2L]: sublayer i puts out 1 on rank 0, 2 on rank
    1, at i alone.
    """
    mesh = parallel.make_mesh(tensor=2)
    count = 2 * topology.num_layers

    def local(x):
        seen = {}
        state = residual.begin(x, topology=topology, axes=("tensor",))

        def sublayer(index):
            def output(x):
                seen[index] = x[0, 0]
                here = jax.nn.one_hot(index, count) * (1.0 + jax.lax.axis_index("tensor"))
                return jnp.zeros_like(x) + here[None, None]

            return output

        for layer, steps in enumerate(topology.layers):
            for step in steps:
                state = step(
                    state, (sublayer(2 * layer), sublayer(2 * layer + 1)), axes=("tensor",)
                )
        rows = jnp.stack([seen[index] for index in range(count)])
        return parallel.pvary(rows, ("tensor",))[None]

    specs = dict(in_specs=PartitionSpec(), out_specs=PartitionSpec("tensor"))
    return np.asarray(jax.jit(jax.shard_map(local, mesh=mesh, **specs))(jnp.zeros((1, 1, count))))[
        0
    ]


DELAYED = {name: one for name, one in TOPOLOGIES.items() if not (one.desync or one.silent)}


@pytest.mark.parametrize("topology", DELAYED.values(), ids=DELAYED)
def test_inputs_leave_out_the_newest_outputs(topology):
    """Those before are sums, 1 + 2; of the newest a fresh ladder reads its rank's own part, 1."""
    expected = np.zeros((2 * LAYERS, 2 * LAYERS))
    for index, delay in enumerate(topology.delays):
        expected[index, : max(0, index - delay)] = 3
        if topology.fresh[index // 2] and index:
            expected[index, index - 1] = 1
    np.testing.assert_array_equal(inputs(topology), expected)


def test_in_words():
    assert repr(residual.topology("ladder", num_layers=32, ladder_layers="16")) == (
        "Topology of 32 layers, 64 sublayers, 64 all-reduces\n"
        "  layers 0-15: attention and MLP read every output before them\n"
        "  layers 16-31: attention and MLP read all but the newest output, all-reduced meanwhile"
    )
    counts = {
        "standard": 8,
        "parallel": 4,
        "parallel-ladder": 4,
        "desync-2": 4,
        "desync-3": 3,
        "no-communication": 0,
    }
    for name, count in counts.items():
        assert repr(TOPOLOGIES[name]).startswith(
            f"Topology of 4 layers, 8 sublayers, {count} all-reduces\n"
        )
    assert "one norm" in repr(TOPOLOGIES["parallel-shared-norm"])


@pytest.mark.parametrize("which", [None, "40", "0,", ",".join(map(str, range(0, 80, 2)))])
def test_of_any_size(which):
    for name in ("ladder-2", "ladder-fresh") if which else config.RESIDUALS:
        topology = residual.topology(name, num_layers=80, ladder_layers=which)
        assert len(repr(topology)) <= 600 and repr(topology).count("\n") <= 6
