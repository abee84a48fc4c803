"""The topologies as values, the identities between them, and `residual` in somebody else's
model.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ladder_jax import config, parallel, residual
from ladder_jax.config import Launch
from ladder_jax.residual.loop import runs_of
from tests import cases, communication, reference
from tests.refusals import refused


def topology(name, layers=None):
    return residual.topology(name, num_layers=4, ladder_layers=layers)


def test_most_topologies_are_a_list_of_delays():
    assert topology("standard").delays == (0,) * 8
    assert topology("ladder").delays == (1,) * 8
    assert topology("ladder-3").delays == (3,) * 8
    assert topology("parallel").delays == (0, 1) * 4
    assert topology("parallel-ladder").delays == (2, 3) * 4
    assert topology("ladder", "1").delays == (0,) * 6 + (1,) * 2
    assert topology("ladder", "0,3").delays == (1, 1, 0, 0, 0, 0, 1, 1)


def test_equal_functions_are_equal_values():
    assert (
        topology("ladder")
        == topology("ladder-1")
        == topology("ladder", "all")
        == topology("ladder", "4")
    )
    assert topology("standard") == topology("ladder", "0") == topology("parallel-ladder", "0")
    assert hash(topology("ladder")) == hash(topology("ladder-1"))
    assert topology("ladder") != topology("ladder-2")


def test_a_standard_layer_before_a_ladder_layer_leaves_its_mlp_pending():
    layers = topology("ladder", "2").layers
    assert [[step.pending_after for step in layer] for layer in layers] == [
        [0, 0],
        [0, 1],
        [1, 1],
        [1, 1],
    ]
    assert layers[0] == topology("standard").layers[0]
    assert layers[2] == topology("ladder").layers[0]
    # a last one by itself, too: `flush` adds what it leaves
    assert topology("ladder", "1").layers[-1] == topology("ladder").layers[-1]


def test_a_standard_layer_after_a_ladder_layer_waits_for_everything():
    layers = topology("ladder", "0,").layers
    assert [step.pending_after for step in layers[0]] == [1, 0]
    assert layers[1:] == topology("standard").layers[1:]


@pytest.mark.parametrize(
    "name, layers, runs",
    [
        *((name, None, [(0, 1, 4)]) for name in ("ladder", "standard", "ladder-3", "desync-2")),
        ("ladder", "2", [(0, 1, 1), (1, 1, 1), (2, 1, 2)]),
        ("desync-4", None, [(0, 2, 2)]),
    ],
)
def test_a_scan_covers_every_run_of_equal_layers(name, layers, runs):
    assert runs_of(topology(name, layers).layers) == runs


def test_unknown_names_and_layers():
    for name in ("laddder", "ladder-0", "desync", "ladder--1", "desync-0", ""):
        with refused("unknown residual"):
            topology(name)
    with refused("did you mean 'ladder-fresh'"):
        topology("ladder-frehs")
    for which in ("5", "4,", "0,0", "x", "", "-1,", "1,x"):
        with refused("ladder_layers"):
            topology("ladder", which)


# These are of the reference, which test_numerics.py holds the package to.


def test_fresh_ladder_and_desync_at_one_rank_are_standard():
    standard = cases.dense_logits("standard", 1)
    for name in ("ladder-fresh", "desync-2", "desync-3", "no-communication"):
        assert cases.error(cases.dense_logits(name, 1), standard) < 1e-12


def test_the_papers_identity():
    """Ladder's MLP of layer l reads what Parallel's layer l reads; its attention reads that less
    MLP l-1.

    So silent MLPs but the last make a Ladder's logits those of Parallel, and a Standard's not.
    """

    def with_only_the_last_mlp(name):
        definition = cases.define(name)
        params = cases.parameters(definition)
        params["layers"]["mlp"]["down"][:-1] = 0
        shape = cases.shape(name, definition.config, ranks=1)
        return reference.evaluate(reference.logits, params, cases.tokens(), shape)

    ladder = with_only_the_last_mlp("ladder")
    assert cases.error(with_only_the_last_mlp("parallel"), ladder) < 1e-12
    assert cases.error(with_only_the_last_mlp("standard"), ladder) > 0.01


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_a_desyncs_stream_between_two_sums_is_that_of_a_model_that_ends_there(number):
    """Its newest output is summed over the ranks, the older ones that are not synced are
    averaged.
    """
    axes = ("tensor",)
    scaled = lambda scale: lambda x: 0.1 * jnp.sin(scale * x) * (1 + parallel.rank(axes))

    def stream(x, *, layers, of):
        """After so many of a model's layers."""
        plan = residual.topology(f"desync-{number}", num_layers=of)
        wire, state = plan.wire(axes), residual.begin(x, topology=plan, axes=axes)
        for step in (step for steps in plan.layers[:layers] for step in steps):
            state = wire.advance(state, step, (scaled(0.3), scaled(0.7)))
        return wire.flush(state)

    def streams(x):
        return [
            (stream(x, layers=count, of=5), stream(x, layers=count, of=count))
            for count in range(1, 6)
        ]

    x = jax.random.normal(jax.random.key(0), (2, 3, 4))
    mesh = parallel.make_mesh(tensor=4)
    found = jax.jit(jax.shard_map(streams, mesh=mesh, in_specs=P(), out_specs=P()))(x)
    for between, at_the_end in found:
        assert cases.error(between, at_the_end) < 1e-5


UNROLLED = residual.__doc__.split("in a loop of your own:\n\n")[1].split("\nA `lax.scan`")[0]


def test_plain_functions_in_halves(monkeypatch):
    """In a loop of one's own, with sublayers that have no gain apart: they wait by their input. In
    whole numbers.
    """
    started = communication.start_on_a_cpu(monkeypatch)
    sublayers = (lambda x: x + parallel.rank(("tensor",)), lambda x: 2 * x)
    axes = ("tensor",)
    plan = residual.topology("ladder", num_layers=2)

    def run(launch):
        def local(x):
            wire, state = (
                plan.wire(axes, launch=launch),
                residual.begin(x, topology=plan, axes=axes),
            )
            for step in (step for steps in plan.layers for step in steps):
                state = wire.advance(state, step, sublayers)
            return wire.flush(state)

        meshed = jax.shard_map(
            local, mesh=parallel.make_mesh(tensor=8), in_specs=P(), out_specs=P()
        )
        return np.asarray(jax.jit(meshed)(jnp.ones((1, 2, 4))))

    x, partial = 1, 0  # by hand: 8 ranks
    for sublayer in (lambda x: 8 * x + 28, lambda x: 16 * x) * 2:
        x, partial = x + partial, sublayer(x)
    for launch, count in ((Launch.CHAINED, 0), (Launch.EXPLICIT, 3)):
        np.testing.assert_array_equal(run(launch), np.full((1, 2, 4), x + partial))
        assert len(started) == count


def example(code, **scope):
    """The x that the lines of the docstring make, as they stand there."""
    exec("\n".join(line[4:] for line in code.splitlines()), scope)  # noqa: S102
    return scope["x"]


def test_ranks_are_written_in_where_the_function_depends_on_them():
    assert parallel.with_ranks(config.preset("tiny", residual="ladder-fresh"), tensor=4).ranks == 4
    trained_on_two = config.preset("tiny", residual="ladder-fresh", ranks=2)
    assert parallel.with_ranks(trained_on_two, tensor=4) == trained_on_two
    ladder = config.preset("tiny", residual="ladder")
    assert parallel.with_ranks(ladder, tensor=4) == ladder
