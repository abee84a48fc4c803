"""What is no sublayer's in a scheduled program: counted, named, judged by the sublayers' rule."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from ladder_jax import parallel, residual, schedule
from ladder_jax.schedule import cost, hlo, judge
from ladder_jax.scopes import TOKEN_LOOP
from tests.test_schedule_text import MATMUL, WINDOW


def test_gradients_of_norm_gains_are_others():
    """A user's gradient step: the gains' gradients are one message of the compiler's, and no
    barrier is missing.
    """
    topology = residual.topology("ladder", num_layers=3)
    all_steps = [step for steps in topology.layers for step in steps]

    def forward(params, x):
        state = residual.begin(x, topology=topology, axes=("tensor",))
        for index, step in enumerate(all_steps):
            gain, w_in, w_out = (params[name][index] for name in ("gain", "in", "out"))
            sublayer = lambda x: jax.nn.relu((x * gain[None, None]) @ w_in) @ w_out
            state = step(state, (sublayer, sublayer), axes=("tensor",))
        return jnp.sum(residual.flush(state, axes=("tensor",)) ** 2)

    specs = {"gain": P(), "in": P(None, None, "tensor"), "out": P(None, "tensor")}
    shapes = {"gain": (6, 16), "in": (6, 16, 64), "out": (6, 64, 16)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    on_ranks = dict(mesh=parallel.make_mesh(tensor=8), in_specs=(specs, P()), out_specs=specs)
    step = jax.jit(jax.shard_map(jax.grad(forward), **on_ranks))
    found = schedule.audit(step, params, jax.ShapeDtypeStruct((2, 8, 16), jnp.float32))
    assert found.merged == 0
    assert {r.collective.bytes for r in found.reductions} == {2 * 8 * 16 * 4}
    assert [one.purpose for one in found.others] == [judge.REPLICATED_GRADIENTS]


def named(op_name, *, axes):
    return (
        WINDOW.replace("BETWEEN", MATMUL)
        .replace("{'tensor'}, to_apply=%add", '{AXES}, to_apply=%add, metadata={op_name="NAME"}')
        .replace("mesh['tensor'=8] {AXES}", f"mesh['fsdp'=2,'tensor'=4] {{{axes}}}")
        .replace("NAME", op_name)
    )


@pytest.mark.parametrize(
    "op_name, axes, purpose",
    [
        ("jit(f)/choose_token/pmax", "'tensor'", "choice of the token"),
        ("jit(f)/jvp(embedding_lookup)/psum", "'tensor'", "embedding"),
        ("jit(f)/(jvp(cross_entropy)/psum:shared_gradients/psum)", "'tensor'",
         "loss, gradients of norm gains and other replicated weights"),
        ("jit(f)/transpose(jvp())/psum", "'fsdp'", "data-parallel gradients"),
        ("jit(f)/psum", "'tensor'", "other: jit(f)/psum"),
    ],
)  # fmt: skip
def test_purposes(op_name, axes, purpose):
    """Judged by the same rule as the sublayers', whose FLOPs are given: one matmul of two is in the
    window.
    """
    found = judge.read(
        hlo.parse(named(op_name, axes=axes)),
        sublayer_flops={"attention": 2 * 512 * 2048 * 2048 * 2},
        launched_only=True,
    )
    (other,) = found.others
    assert (other.purpose, other.count, found.other_hidden, found.all_reduces) == (purpose, 1, 1, 0)


ALONE = """
  %alone = f32[]{:T(128)} all-reduce(%x), replica_groups=mesh['tensor'=1] {'tensor'}, to_apply=%add"""


def test_an_all_reduce_over_one_device_is_none():
    text = WINDOW.replace("BETWEEN", MATMUL + ALONE)
    assert judge.read(hlo.parse(text), launched_only=True).others[1:] == ()


def test_a_token_loop_counts_one_token():
    """And the loops over layers in it, all their turns."""

    def local(x, w):
        def layer(x, w):
            return parallel.all_reduce(jnp.tanh(x) @ w, ("tensor",)), None

        def token(x, _):
            return jax.lax.scan(layer, x, w)[0] + 1, None

        with jax.named_scope(TOKEN_LOOP):
            return jax.lax.scan(token, x, length=7)[0]

    specs = dict(in_specs=(P(), P(None, None, None)), out_specs=P(), check_vma=False)
    step = jax.jit(jax.shard_map(local, mesh=parallel.make_mesh(tensor=8), **specs))
    text = step.lower(jnp.ones((4, 64)), jnp.ones((5, 64, 64))).compile().as_text()
    assert schedule.audit(text).all_reduces == 5
    unnamed = text.replace(TOKEN_LOOP, "loop")
    assert schedule.audit(unnamed).all_reduces == 35
    assert cost.Costs(hlo.parse(unnamed)).bytes_moved > 5 * cost.Costs(hlo.parse(text)).bytes_moved


NAMED = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from ladder_jax import parallel, schedule

mesh = parallel.make_mesh(tensor=2)
for scope in ("one", "another"):
    def local(x, scope=scope):
        with jax.named_scope(scope):
            return parallel.all_reduce(x, ("tensor",))

    meshed = jax.shard_map(local, mesh=mesh, in_specs=P("tensor"), out_specs=P())
    (only,) = schedule.audit(meshed, jax.ShapeDtypeStruct((64,), jnp.float32)).reductions
    assert f"/{scope}/" in only.collective.op_name, only
"""


def test_names_are_the_program_s_own(run_python, tmp_path):
    """And not those of the same operations in other scopes, compiled and kept before."""
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    run_python("-c", NAMED, check_status=0, **kept)
    assert os.listdir(tmp_path)
