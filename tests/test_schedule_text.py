"""The schedule's reader against small programs that are written here, what is no schedule, and
functions of a user.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from ladder_jax import parallel, schedule
from ladder_jax.config import Loop, Phase
from ladder_jax.schedule import collectives, cost, hlo, judge, targets
from ladder_jax.schedule.report import Status, layer_range
from tests.hlo import parsed, text
from tests.refusals import refused


@pytest.mark.parametrize(
    "groups_, axes, ranks",
    [
        ("mesh['data'=1,'fsdp'=2,'tensor'=4] {'fsdp'}", ("fsdp",), 2),
        ("mesh['data'=1,'fsdp'=2,'tensor'=4] {'tensor','fsdp'}", ("tensor", "fsdp"), 8),
        ("mesh['data'=1,'fsdp'=2,'tensor'=4] {'fsdp','tensor':(1)2}", (), 4),  # half of an axis
        ("{{0,4},{1,5},{2,6},{3,7}}", ("fsdp",), 2),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("tensor",), 4),  # the compiler's own names
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1'}", (), 2),  # half of an axis
        ("{{0,1,2,3},{4,5,6,7}}", ("tensor",), 4),
        ("{{0,1,2,3,4,5,6,7}}", ("fsdp", "tensor"), 8),
        ("{{0,1},{2,3},{4,5},{6,7}}", (), 2),  # half of an axis
        ("[4,2]<=[2,4]T(1,0)", ("fsdp",), 2),
        ("[2,4]<=[8]", ("tensor",), 4),
        ("{{0,8}}", (), 2),  # not of this mesh
        ("", (), 0),
    ],
)
def test_groups_of_devices(groups_, axes, ranks):
    mesh = collectives.mesh_of(parsed("h100-sharded"))
    assert mesh == {"data": 1, "fsdp": 2, "tensor": 4}
    one = hlo.Instruction(
        "r", "f32[8]{0}", "reduce-scatter", (), f"channel_id=1, replica_groups={groups_}, a={{0}}"
    )
    assert collectives.group_of(one, mesh=mesh) == (axes, ranks)


WINDOW = """HloModule window, is_scheduled=true

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

ENTRY %main (x: bf16[512,2048], w: bf16[2048,2048]) -> bf16[512,2048] {
  %x = bf16[512,2048]{1,0} parameter(0)
  %w = bf16[2048,2048]{1,0} parameter(1)
  %before = bf16[512,2048]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all-reduce-start = bf16[512,2048]{1,0} all-reduce-start(%before), replica_groups=mesh['tensor'=8] {'tensor'}, \
to_apply=%add
BETWEEN
  %all-reduce-done = bf16[512,2048]{1,0} all-reduce-done(%all-reduce-start)
  %after = bf16[512,2048]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = bf16[512,2048]{1,0} add(%all-reduce-done, %after)
}
"""
COPIES = """  %copy-start = (bf16[2048,2048]{1,0}, bf16[2048,2048]{1,0}, u32[]) copy-start(%w)
  %copy-done = bf16[2048,2048]{1,0} copy-done(%copy-start)
  %copy = bf16[512,2048]{0,1} copy(%x)"""
MATMUL = "  %between = bf16[512,2048]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
    "between, status",
    [(COPIES, Status.EXPOSED), ("", Status.EXPOSED), (MATMUL, Status.HIDDEN)],
    ids=str,
)
def test_only_compute_hides(between, status):
    program = WINDOW.replace("BETWEEN", between)
    (only,) = schedule.audit(program).reductions
    assert only.status is status
    (measured,) = judge.read(hlo.parse(program), sublayer_flops={"attention": 1e10}).reductions
    assert measured.status is status
    assert measured.window == pytest.approx(
        2 * 512 * 2048 * 2048 / 1e10 if between == MATMUL else 0
    )


@pytest.mark.parametrize(
    "branches",
    ["branch_computations={%no, %yes}", "true_computation=%yes, false_computation=%no"],
)
def test_a_collective_in_a_branch_counts(branches):
    """XLA writes a conditional of two branches in either way."""
    computations = """%yes (p: bf16[512,2048]) -> bf16[512,2048] {
  %p = bf16[512,2048]{1,0} parameter(0)
  ROOT %summed = bf16[512,2048]{1,0} all-reduce(%p), to_apply=%add
}

%no (q: bf16[512,2048]) -> bf16[512,2048] {
  ROOT %q = bf16[512,2048]{1,0} parameter(0)
}

ENTRY"""
    line = f"  %either = bf16[512,2048]{{1,0}} conditional(%c, %x, %x), {branches}"
    choice = "  %c = pred[] constant(true)"
    found = schedule.audit(
        WINDOW.replace("ENTRY", computations).replace("BETWEEN", f"{choice}\n{line}")
    )
    counted = {r.collective.name: r.collective.executions for r in found.reductions}
    assert counted == {"summed": 1, "all-reduce-start": 1}


@pytest.mark.parametrize(
    "caller, kind",
    [
        ("fusion(%x, %x), calls=%kept", "reduce-scatter"),
        ("call(%x, %x), to_apply=%kept", "all-reduce"),
    ],
)
def test_slices_of_sums_that_one_fusion_makes_are_scattered(caller, kind):
    """A TPU's joins those of several arrays; a computation's own slices are operations apart."""
    computations = """%kept (p: bf16[512,2048], q: bf16[512,2048]) -> (bf16[64,2048], bf16[512,256]) {
  %p = bf16[512,2048]{1,0} parameter(0)
  %q = bf16[512,2048]{1,0} parameter(1)
  %i = u32[] constant(0)
  %both = (bf16[512,2048]{1,0}, bf16[512,2048]{1,0}) all-reduce(%p, %q), to_apply=%add
  %first = bf16[512,2048]{1,0} get-tuple-element(%both), index=0
  %rows = bf16[64,2048]{1,0} dynamic-slice(%first, %i, %i), dynamic_slice_sizes={64,2048}
  %second = bf16[512,2048]{1,0} get-tuple-element(%both), index=1
  %columns = bf16[512,256]{1,0} dynamic-slice(%second, %i, %i), dynamic_slice_sizes={512,256}
  ROOT %tuple = (bf16[64,2048]{1,0}, bf16[512,256]{1,0}) tuple(%rows, %columns)
}

ENTRY"""
    line = f"  %shares = (bf16[64,2048]{{1,0}}, bf16[512,256]{{1,0}}) {caller}"
    found = schedule.audit(WINDOW.replace("ENTRY", computations).replace("BETWEEN", line))
    assert [r.collective.kind for r in found.reductions if r.count == 2] == [kind]


@pytest.mark.parametrize(
    "pairs, ranks",
    {
        "{0,0},{1,2},{2,1},{3,3}": [2],  # a matrix is transposed: the diagonal stays
        "{0,1},{1,2}": [0],
        "{0,0},{1,1}": [],  # nothing moves
    }.items(),
)
def test_permutes(pairs, ranks):
    line = f"  %permute = bf16[512,2048]{{1,0}} collective-permute(%x), source_target_pairs={{{pairs}}}"
    found = schedule.audit(WINDOW.replace("BETWEEN", line))
    assert [other.collective.ranks for other in found.others] == ranks


def test_a_ragged_all_to_all_carries_its_rows_alone():
    """Not the array that they are written to, nor their offsets and numbers."""
    line = """  %n = s32[2]{0} constant({8, 8})
  %rows = bf16[512,2048]{1,0} ragged-all-to-all(%x, %before, %n, %n, %n, /*index=5*/%n), replica_groups={{0,1}}"""
    (only,) = schedule.audit(WINDOW.replace("BETWEEN", line)).others
    assert (only.collective.operands, only.collective.bytes) == (1, 512 * 2048 * 2)


@pytest.mark.parametrize("name, arrays", [("", 2), ("jit(f)/concatenate", 1)])
def test_arrays_that_the_program_joins_itself_are_one(name, arrays):
    """As `jax.flatten_util.ravel_pytree` does with gradients; the compiler's have no name."""
    line = f"""  %flat = bf16[4]{{0}} constant({{1, 2, 3, 4}})
  %joined = bf16[8]{{0}} concatenate(%flat, %flat), dimensions={{0}}, metadata={{op_name="{name}"}}
  %sum = bf16[8]{{0}} all-reduce(%joined), to_apply=%add"""
    found = schedule.audit(WINDOW.replace("BETWEEN", line))
    assert {r.collective.name: r.count for r in found.reductions}["sum"] == arrays


def test_what_is_not_a_schedule_is_refused():
    with refused("not the text of an HLO module"):
        schedule.audit("module @jit_f {}")
    with refused("not an instruction of HLO: '%x = a form"):
        schedule.audit(WINDOW.replace("BETWEEN", "  %x = a form of tomorrow"))
    with refused("the text of several HLO modules"):
        schedule.audit(f"{text('h100-tiny')}\n\n{text('tpu7x-unrolled')}")
    with refused("has not been scheduled"):
        schedule.audit(jax.jit(jnp.sin).lower(1.0).as_text("hlo"))
    with refused("never awaits"):
        schedule.audit(WINDOW.replace("BETWEEN", "").replace("all-reduce-done(", "copy("))
    with pytest.raises(AssertionError, match="no all-reduces"):
        schedule.assert_hidden(WINDOW.replace("BETWEEN", "").replace("all-reduce-", "copy-"))


def test_an_unknown_form_is_named():
    """Rather than left out: an all-gather that a custom call runs, or any other caller, an
    operation of another name, a message to another device, but none to the host, and kernels that
    write to other devices.
    """
    called = """%inner (p: bf16[512,2048]) -> bf16[512,2048] {
  %p = bf16[512,2048]{1,0} parameter(0)
  ROOT %within = bf16[512,2048]{1,0} all-gather(%p), dimensions={0}
}

%other (q: bf16[512,2048]) -> pred[] {
  %q = bf16[512,2048]{1,0} parameter(0)
  ROOT %asked = pred[] all-reduce(%q), to_apply=%add
}

ENTRY"""
    lines = """  %call = bf16[512,2048]{1,0} custom-call(%before), called_computations={%inner}
  %by = bf16[512,2048]{1,0} another(%before), way=%other
  %new = bf16[512,2048]{1,0} all-to-some(%before)
  %token = token[] after-all()
  %send = (bf16[512,2048]{1,0}, u32[], token[]) send(%before, %token), channel_id=2
  %send-done = token[] send-done(%send), channel_id=2
  %log = (bf16[512,2048]{1,0}, u32[], token[]) send(%before, %token), channel_id=3, is_host_transfer=true
  %tpu = bf16[512,2048]{1,0} custom-call(%before), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"TUz","has_communication":true,"collective_id":"0"}}
  %gpu = bf16[512,2048]{1,0} custom-call(%before), custom_call_target="mosaic_gpu_v2", \
backend_config={module = "ML", uses_xla_collective_metadata = true, xla_replica_ids = "0,1"}
  %own = bf16[512,2048]{1,0} custom-call(%before), custom_call_target="mosaic_gpu_v2", \
backend_config={module = "ML", uses_xla_collective_metadata = false}"""
    program = WINDOW.replace("ENTRY", called).replace("BETWEEN", f"{MATMUL}\n{lines}")
    found = schedule.audit(program)
    assert found.unknown == ("within", "asked", "new", "send", "tpu", "gpu")
    assert (found.all_reduces, found.hidden) == (1, 1)
    assert (
        found.verdict
        == "1 of 1 all-reduces hidden; NOT counted, as their form is unknown: within, asked, new, send, tpu, gpu"
    )
    with pytest.raises(
        AssertionError,
        match="NOT counted, as their form is unknown: within, asked, new, send, tpu, gpu",
    ):
        schedule.assert_hidden(program)


ALONE = """
import json, sys
import jax
from jax.sharding import PartitionSpec as P
from ladder_jax import schedule

mesh = jax.sharding.Mesh(jax.devices()[:2], ("model",))
meshed = jax.shard_map(lambda x: jax.lax.psum(x, "model"), mesh=mesh, in_specs=P("model"), out_specs=P())
found = json.loads(json.dumps(schedule.audit(meshed, jax.ShapeDtypeStruct((8,), "float32")).as_dict()))
assert (found["schema"], found["all_reduces"], found["reductions"][0]["axes"]) == (1, 1, ["model"])
ours = {name.split(".")[1] for name in sys.modules if name.startswith("ladder_jax.")}
assert ours == {"schedule", "errors", "hardware", "python", "scopes", "terminal"}, ours
assert not {"flax", "optax", "rich", "yaml"} & set(sys.modules)
"""


def test_the_auditor_needs_jax_alone(run_python):
    """Of a user's own function: no other package of the library is imported. Its JSON is plain."""
    run_python("-c", ALONE, check_status=0)


@pytest.mark.parametrize(
    "written, instead, turns",
    [
        ("direction=LT", "direction=NE", None),
        ("add(%copy.11", "multiply(%copy.11", None),
        ("s32[]{:T(128)} constant(3)", "s32[]{:T(128)} partition-id()", None),
        ("copy(%constant.16.clone.1)", "partition-id()", None),
        ("copy(%constant.16.clone.1)", "copy(%constant.12.clone.1)", 2),
        ("..sunk = s32[]{:T(128)} constant(1)", "..sunk = s32[]{:T(128)} constant(2)", 2),
    ],
)
def test_a_loop_turns_as_often_as_its_counter_says(written, instead, turns):
    """Three times, from 0 by 1 while it is less than 3. One of unknown length is refused, rather
    than guessed.
    """
    assert text("tpu7x-scan").count(written) == 1
    program = hlo.parse(text("tpu7x-scan").replace(written, instead))
    (loop,) = (one for one in program.instructions if one.opcode == "while")
    if turns is None:
        with refused("does not show how often the loop"):
            judge.read(program)
    else:
        assert cost.iterations(loop) == turns


@pytest.mark.parametrize(
    "op_name, owner",
    {
        "jit(f)/layer_3/mlp/launch_sublayer_output/previous/psum": ("3", "attention"),
        "jit(f)/layer_3/attention/launch_sublayer_output/previous/psum": ("2", "mlp"),
        "jit(f)/layer_3/joint/launch_sublayer_output/previous/psum": ("2", "joint"),
        "jit(f)/layer_3/mlp/launch_sublayer_output/psum": ("3", "mlp"),
        "jit(f)/layers_0_to_79/while/body/attention/launch_sublayer_output/previous/psum": (
            "0-79",
            "mlp",
        ),
        "jit(f)/transpose(jvp(layer_1))/attention/enter_sublayer_input/psum": ("1", "attention"),
        "jit(f)/launch_sublayer_output/previous/psum": ("last", ""),
        "jit(f)/layer_0/attention/enter_sublayer_input/all_gather": ("0", "attention"),
        "jit(f)/layer_3/attention/enter_sublayer_input/following/all_gather": ("3", "mlp"),
        "jit(f)/layer_3/mlp/enter_sublayer_input/following/all_gather": ("4", "attention"),
        "jit(f)/layer_3/joint/enter_sublayer_input/following/all_gather": ("4", "joint"),
        "jit(f)/enter_sublayer_input/following/all_gather": ("last", ""),
        "jit(f)/transpose(jvp(layer_3))/gather_weights/all_gather": ("3", ""),
        "jit(f)/jit(_splash_attention)/psum": ("", ""),
    }.items(),
)
def test_owner(op_name, owner):
    assert judge.owner(op_name) == owner


@pytest.mark.parametrize(
    "words, layers",
    {
        "3": "3",
        "3, 1": "31",
        "0-3": "3201",
        "4, 2, 0": "420",
        "1-3": "1123",
        "0-1, 2": ["0-1", "2"],
    }.items(),
)
def test_names_of_layers(layers, words):
    assert layer_range(list(layers)) == words


def test_functions_of_a_user():
    """Jitted with its arguments, lowered, compiled, or plain; here for the CPU, which hides
    nothing.
    """
    mesh = parallel.make_mesh(tensor=8)

    named = jax.named_scope("of calls=2, body={")(jnp.tanh)
    local = lambda x: parallel.all_reduce(named(x), ("tensor",))
    meshed = jax.shard_map(local, mesh=mesh, in_specs=P("tensor"), out_specs=P())
    x = jnp.ones((8, 64))
    jitted = jax.jit(meshed)
    traits = parallel.Traits(parallel.Overlap.HIDES, Phase.PREFILL, Loop.SCAN)
    ours = parallel.Compiled(meshed, mesh=mesh, traits=traits)
    stages = []
    for jit in (jax.jit, nnx.jit):
        lowered = jit(meshed).lower(x)
        stages += [(lowered,), (lowered.compile(),)]
    for asked in [(jitted, x), (meshed, x), (ours, x), *stages]:
        (only,) = schedule.audit(*asked).reductions
        assert (only.status, only.layer, only.sublayer) == (Status.SYNCHRONOUS, "", "")
        assert (only.collective.bytes, only.collective.axes) == (64 * 4, ("tensor",))
    with pytest.raises(AssertionError, match="0 of 1 all-reduces hidden"):
        schedule.assert_hidden(jitted, x, exposed=0)


def test_meshes_of_targets():
    mesh = schedule.make_mesh("cpu:8", tensor=4, data=2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "tensor": 4}
    for data, tensor in ((2, 8), (9, None)):
        with refused("needs .* devices, but this machine has 8"):
            schedule.make_mesh("cpu:8", tensor=tensor, data=data)
    with refused("needs JAX_NUM_CPU_DEVICES=16"):
        schedule.make_mesh("cpu:16")
    with refused("12 GPUs do not fill hosts of 8"):
        targets._hosts(12)
    assert [targets._hosts(n) for n in (1, 4, 8, 16)] == ["1x1x1", "1x1x4", "1x1x8", "1x2x8"]
