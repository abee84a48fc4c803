"""The schedule's reader against what real compilers wrote (tests/hlo), and against its own possible
mistakes.
"""

import collections
import dataclasses
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from ladder_jax import parallel, schedule
from ladder_jax.config import Loop, Phase
from ladder_jax.errors import UserError
from ladder_jax.schedule import collectives, cost, hlo, judge, rings, targets
from ladder_jax.schedule.report import Status, layer_range
from tests.hlo import RANKS, SUBLAYERS, UNROLLED, D, F, T, parsed, text

LAST = "; the last one comes after all compute, so it is always exposed"
SYNCHRONOUS, AWAITED = ": each is synchronous", ": each is awaited where it is issued"
MERGED = "; 6 were merged by the compiler, so no compute can hide them"
COUNTS = [
    # (reductions, of them asynchronous, hidden, merged), and why the others are not hidden
    ("h100-unrolled", (6, 5, 5, 0), LAST),
    ("h100-halves", (6, 5, 5, 0), LAST),
    ("tpu7x-unrolled", (6, 6, 5, 0), LAST),
    ("v5p-unrolled", (6, 6, 5, 0), LAST),
    ("v5e-unrolled", (6, 5, 5, 0), LAST),
    ("h100-small", (6, 5, 5, 0), LAST),
    # three turns of two, and the last one's output after the loop
    ("h100-scan", (7, 6, 6, 0), LAST),
    ("tpu7x-scan", (7, 7, 6, 0), LAST),
    ("tpu7x-halves", (7, 7, 6, 0), LAST),
    ("h100-standard", (6, 0, 0, 0), SYNCHRONOUS),
    ("tpu7x-standard", (6, 6, 0, 0), AWAITED),
    ("v5p-sync", (6, 0, 0, 0), SYNCHRONOUS),
    ("h100-tiny", (1, 1, 0, 0), AWAITED),
    # As an all-reduce of two operands (TPU), or of one flat array joined of two (NVIDIA).
    ("h100-naive", (6, 0, 0, 6), MERGED),
    ("tpu7x-naive", (6, 6, 0, 6), MERGED),
]


@pytest.mark.parametrize("name, counts, why", COUNTS)
def test_counts(name, counts, why):
    found = schedule.audit(text(name))
    assert (found.all_reduces, found.asynchronous, found.hidden, found.merged) == counts
    assert found.verdict == f"{found.hidden} of {found.all_reduces} all-reduces hidden{why}"
    assert (found.window_flops_fraction is None) == (found.hidden == 0)
    assert (found.hidden_time_fraction is None) == name.startswith("h100")
    if why == LAST:
        assert schedule.assert_hidden(text(name)).hidden == found.hidden


@pytest.mark.parametrize(
    "name, allowed, error",
    [
        (
            "h100-standard",
            1,
            "6 of 6 reductions are not hidden, 1 allowed: .+ bytes.*: synchronous",
        ),
        ("tpu7x-standard", 1, "too little compute"),
        ("h100-tiny", 0, "too little compute"),
        ("h100-naive", SUBLAYERS, "merged with another"),
    ],
)
def test_what_is_not_hidden_is_named(name, allowed, error):
    with pytest.raises(AssertionError, match=error):
        schedule.assert_hidden(text(name), exposed=allowed)


@pytest.mark.parametrize("name", UNROLLED)
def test_the_reductions_of_an_unrolled_ladder(name):
    found = schedule.audit(text(name))
    assert {(r.collective.bytes, r.collective.axes) for r in found.reductions} == {
        (T * D * 2, ("tensor",))
    }
    assert all(f"%{r.collective.name} = " in text(name) for r in found.reductions)
    assert 0.4 < found.window_flops_fraction["least"] <= found.window_flops_fraction["median"] <= 2
    assert name.startswith("h100") or 0.3 < found.hidden_time_fraction < 1


def test_halves_stand_around_a_whole_sublayer():
    """Of plain functions, without a gain. The compiler leaves half of a sublayer beside a whole
    all-reduce.
    """
    assert schedule.audit(text("h100-halves")).window_flops_fraction["least"] >= 1
    assert schedule.audit(text("h100-unrolled")).window_flops_fraction["median"] < 0.6
    names = {
        r.collective.op_name.rpartition("/")[2]
        for r in schedule.audit(text("h100-halves")).reductions[:-1]
    }
    assert names == {"psum_invariant_start"}


def dumped(text):
    """As `--xla_dump_to` writes it: an element of a tuple is `%x#1`, without an instruction of its
    own.
    """
    line = re.compile(r"\n +%([\w.\-]+) = \S.* get-tuple-element\(%(\S+)\), index=(\d+).*")
    for name, source, index in line.findall(text):
        text = re.sub(rf"%{re.escape(name)}(?![\w.\-])", f"%{source}#{index}", text)
    return re.sub(r"\n +%\S+#\d+ = .*", "", text)


@pytest.mark.parametrize("name", ["h100-sharded", "tpu7x-scan"])
def test_a_dump_of_xla_reads_as_the_compiled_text(name):
    program = hlo.parse(dumped(text(name)))
    assert "get-tuple-element(" not in dumped(text(name))
    assert judge.read(program).as_dict() == schedule.audit(text(name)).as_dict()
    assert cost.bytes_moved(program) == cost.bytes_moved(parsed(name))


def read(name, *, ranks, ff=F):
    """As the library's own programs are read: by scopes."""
    one = 2 * 2 * T * D * ff / ranks
    return judge.read(parsed(name), sublayer_flops={"attention": one, "mlp": one})


@pytest.mark.parametrize(
    "name, ff", [("h100-split", F), ("tpu7x-split", 4 * F), ("v5p-split", 4 * F)]
)
def test_both_halves_of_a_reduction_hide(name, ff):
    """v5p's compiler rewrites a reduce-scatter to an all-reduce, of which it forgets whose it
    was.
    """
    found = read(name, ranks=RANKS, ff=ff)
    moved = collections.defaultdict(list)
    for r in found.reductions:
        moved[r.collective.kind].append((r.layer, r.sublayer, r.status is Status.HIDDEN))
    half = "all-reduce" if name.startswith("v5p") else "reduce-scatter"
    first, second, *others = [
        (layer, sublayer, True) for layer in "012" for sublayer in ("attention", "mlp")
    ]
    assert (
        moved
        == {
            "all-gather": [(*first[:2], False), *others],  # the second sublayer reads the same
            half: [first, second, *others[:-1], ("last", "", False)],
        }
    )
    sizes = {r.collective.kind: r.collective.bytes for r in found.reductions}
    assert sizes == {half: T * D * 2, "all-gather": T * D * 2 // RANKS}
    assert (found.merged, found.gathers, found.scatters) == (0, (), ())


def test_a_standard_stream_that_is_split_hides_nothing():
    found = read("h100-split-standard", ranks=RANKS)
    assert found.verdict == f"0 of {2 * SUBLAYERS} collectives hidden{SYNCHRONOUS}"


RING_BYTES = 7 * T // 8 * D * 2  # of 8 ranks, 7 chunks


@pytest.mark.parametrize("name, ff", [("h100-ring", F), ("tpu7x-ring", 4 * F)])
def test_a_ring_is_one_collective(name, ff):
    """A Standard layer's two gathers and two scatters, of 7 permutes each."""
    found = read(name, ranks=RANKS, ff=ff)
    kinds = [(r.layer, r.sublayer, r.count, r.collective.bytes, r.status) for r in found.reductions]
    assert kinds == [
        ("0", part, 1, RING_BYTES, Status.HIDDEN)
        for part in ("attention", "attention", "mlp", "mlp")
    ]
    assert (found.all_reduces, found.asynchronous, found.merged) == (4, 4, 0)
    half = 2 * T * D * ff / RANKS  # FLOPs of one of a sublayer's two matmuls
    for ring in (r.collective for r in found.reductions):
        assert (ring.axes, ring.ranks, len(ring.parts), ring.matmul) == (
            ("tensor",),
            RANKS,
            7,
            half,
        )


def test_a_ring_is_hidden_only_if_each_of_its_messages_is():
    ring = read("h100-ring", ranks=RANKS).reductions[1].collective
    first, *others = ring.permutes

    def covered(share):
        """With so much of an n-th of the matmul beside the first message."""
        flops = cost.Flops(attention=share * ring.matmul / RANKS)
        return of(dataclasses.replace(first, flops=flops), *others)

    of = lambda *permutes: rings.covered(dataclasses.replace(ring, permutes=permutes))
    assert of(first, *others) and covered(0.5) and not covered(0.49) and not covered(0)
    assert not rings.covered(dataclasses.replace(ring, matmul=0.0))
    # XLA's own begin with a message that stands before the loop: one of its nine.
    bare = dataclasses.replace(first, flops=cost.Flops())
    assert of(bare, dataclasses.replace(others[0], executions=8))
    assert not of(bare, dataclasses.replace(others[0], executions=6))


def test_a_compilers_ring_is_a_loop():
    """Two turns of four permutes, after one; of small messages v5p starts half of them with nothing
    beside them.
    """
    found = read("v5p-compiler", ranks=RANKS, ff=4 * F)
    assert [(r.sublayer, r.collective.kind) for r in found.reductions] == [
        (sublayer, kind)
        for sublayer in ("attention", "mlp")
        for kind in ("collective-permute", "all-reduce")
    ]
    for ring in (
        r.collective for r in found.reductions if r.collective.kind == "collective-permute"
    ):
        assert [part.executions for part in ring.parts] == [1, 2, 2, 2, 2]
        assert ring.executions == 1
        assert (ring.bytes, ring.matmul) == (9 * T // 8 * D * 2, 2 * T * D * 4 * F / RANKS)
        assert not ring.synchronous
        assert not rings.covered(ring)
    assert found.hidden == 0
    assert found.step_cycles > 0


def moved(transfers) -> dict:
    """How many arrays, by (layer, backward, status)."""
    found = collections.Counter()
    for one in transfers:
        found[one.layer, one.backward, one.status] += one.count
    return dict(found)


def test_weights_are_gathered_and_gradients_scattered():
    """Of 4 matrices in each of 3 layers. The last layer's output is only summed: two of its
    matrices are not read forward; nor, as the input has no gradient, are two of the first layer's
    backward.
    """
    found = read("tpu7x-sharded", ranks=4)
    hidden = Status.HIDDEN
    exposed = Status.EXPOSED
    assert moved(found.gathers) == {
        ("0", False, exposed): 1,
        ("0", False, hidden): 3,
        ("1", False, hidden): 4,
        ("2", False, exposed): 1,
        ("2", False, hidden): 1,
        ("2", True, exposed): 1,
        ("2", True, hidden): 3,
        ("1", True, exposed): 1,
        ("1", True, hidden): 3,
        ("0", True, hidden): 2,
    }
    assert moved(found.scatters) == {
        ("2", True, hidden): 4,
        ("1", True, hidden): 4,
        ("0", True, hidden): 3,
        ("0", True, exposed): 1,
    }
    assert (found.hidden, found.all_reduces, found.merged) == (6, 8, 0)


def test_weights_that_a_compiler_gathers_at_once():
    """A GPU's joins small messages of all layers: one gather forward and one scatter, with the last
    one's name.
    """
    found = read("h100-sharded", ranks=4)
    assert moved(found.gathers) == {
        ("2", False, Status.SYNCHRONOUS): 10,
        ("2", True, Status.EXPOSED): 4,
        ("1", True, Status.HIDDEN): 4,
        ("0", True, Status.HIDDEN): 2,
    }
    assert moved(found.scatters) == {("2", True, Status.SYNCHRONOUS): 12}
    assert (found.hidden, found.all_reduces, found.merged) == (6, 8, 0)


@pytest.mark.parametrize("name", ["h100-sharded", "tpu7x-sharded"])
def test_what_is_moved_over_the_fsdp_axis(name):
    found, whole = read(name, ranks=4), D * F // 4
    of = lambda transfers: {
        (c.axes, c.ranks, c.bytes // c.operands) for c in (t.collective for t in transfers)
    }
    assert of(found.gathers) == {(("fsdp",), 2, whole * 2 // 2)}  # shares, bfloat16
    assert of(found.scatters) == {(("fsdp",), 2, whole * 4)}  # whole, float32
    assert {r.collective.axes for r in found.reductions} == {("tensor",)}
    assert found.others == ()


def test_reduce_scatters_that_a_compiler_made_of_all_reduces():
    """An all-reduce of a padded array and its slice, in one nameless fusion over devices by their
    numbers.
    """
    found = read("v5p-sharded-sync", ranks=4)
    assert sum(moved(found.gathers).values()) == 20
    assert moved(found.scatters) == {(layer, True, Status.SYNCHRONOUS): 4 for layer in "012"}
    assert {(t.collective.kind, t.collective.axes) for t in found.scatters} == {
        ("reduce-scatter", ("fsdp",))
    }


@pytest.mark.parametrize(
    "groups_, axes, ranks",
    [
        ("mesh['data'=1,'fsdp'=2,'tensor'=4] {'fsdp'}", ("fsdp",), 2),
        ("mesh['data'=1,'fsdp'=2,'tensor'=4] {'tensor','fsdp'}", ("tensor", "fsdp"), 8),
        ("mesh['data'=1,'fsdp'=2,'tensor'=4] {'fsdp','tensor':(1)2}", (), 4),  # half of an axis
        ("{{0,4},{1,5},{2,6},{3,7}}", ("fsdp",), 2),
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
    program = parsed("h100-sharded")
    mesh = collectives.mesh_of(program)
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
    (measured,) = schedule.audit(program, sublayer_flops={"attention": 1e10}).reductions
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
    "pairs, ranks",
    [
        ("{0,0},{1,2},{2,1},{3,3}", [2]),  # a matrix is transposed: the diagonal stays
        ("{0,1},{1,2}", [0]),
        ("{0,0},{1,1}", []),  # nothing moves
    ],
)
def test_permutes(pairs, ranks):
    line = f"  %permute = bf16[512,2048]{{1,0}} collective-permute(%x), source_target_pairs={{{pairs}}}"
    found = schedule.audit(WINDOW.replace("BETWEEN", line))
    assert [other.collective.ranks for other in found.others] == ranks


@pytest.mark.parametrize("name, arrays", [("", 2), ("jit(f)/concatenate", 1)])
def test_arrays_that_the_program_joins_itself_are_one(name, arrays):
    """As `jax.flatten_util.ravel_pytree` does with gradients; the compiler's have no name."""
    line = f"""  %flat = bf16[4]{{0}} constant({{1, 2, 3, 4}})
  %joined = bf16[8]{{0}} concatenate(%flat, %flat), dimensions={{0}}, metadata={{op_name="{name}"}}
  %sum = bf16[8]{{0}} all-reduce(%joined), to_apply=%add"""
    found = schedule.audit(WINDOW.replace("BETWEEN", line))
    assert {r.collective.name: r.count for r in found.reductions}["sum"] == arrays


def test_what_is_not_a_schedule_is_refused():
    with pytest.raises(UserError, match="unknown sublayer 'atention'; did you mean 'attention'"):
        schedule.audit(text("h100-tiny"), sublayer_flops={"atention": 1e9})
    with pytest.raises(UserError, match="not the text of an HLO module"):
        schedule.audit("module @jit_f {}")
    with pytest.raises(UserError, match="not an instruction of HLO: '%x = a form"):
        schedule.audit(WINDOW.replace("BETWEEN", "  %x = a form of tomorrow"))
    with pytest.raises(UserError, match="the text of several HLO modules"):
        schedule.audit(f"{text('h100-tiny')}\n\n{text('tpu7x-unrolled')}")
    with pytest.raises(ValueError, match="has not been scheduled"):
        schedule.audit(jax.jit(jnp.sin).lower(1.0).as_text("hlo"))
    with pytest.raises(ValueError, match="never awaits"):
        schedule.audit(WINDOW.replace("BETWEEN", "").replace("all-reduce-done(", "copy("))
    with pytest.raises(AssertionError, match="no reduction"):
        schedule.assert_hidden(WINDOW.replace("BETWEEN", "").replace("all-reduce-", "copy-"))


def test_an_unknown_form_is_named():
    """Rather than left out: an all-gather that a custom call runs, or any other caller, an
    operation of another name, and a message to another device, but none to the host.
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
  %log = (bf16[512,2048]{1,0}, u32[], token[]) send(%before, %token), channel_id=3, is_host_transfer=true"""
    program = WINDOW.replace("ENTRY", called).replace("BETWEEN", f"{MATMUL}\n{lines}")
    found = schedule.audit(program)
    assert found.unknown == ("within", "asked", "new", "send")
    assert (found.all_reduces, found.hidden) == (1, 1)
    assert (
        found.verdict
        == "1 of 1 all-reduces hidden; NOT counted, as their form is unknown: within, asked, new, send"
    )
    with pytest.raises(
        AssertionError, match="not counted, as their form is unknown: within, asked, new, send"
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


def test_the_auditor_needs_jax_alone():
    """Of a user's own function: no other package of the library is imported. Its JSON is plain."""
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=300)


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
        with pytest.raises(ValueError, match="cannot tell how often the loop"):
            judge.read(program)
    else:
        assert cost.iterations(loop) == turns


@pytest.mark.parametrize(
    "op_name, owner",
    [
        ("jit(f)/layer_3/mlp/launch_sublayer_output/previous/psum", ("3", "attention")),
        ("jit(f)/layer_3/attention/launch_sublayer_output/previous/psum", ("2", "mlp")),
        ("jit(f)/layer_3/joint/launch_sublayer_output/previous/psum", ("2", "joint")),
        ("jit(f)/layer_3/mlp/launch_sublayer_output/psum", ("3", "mlp")),
        (
            "jit(f)/layers_0_to_79/while/body/attention/launch_sublayer_output/previous/psum",
            ("0-79", "mlp"),
        ),
        ("jit(f)/transpose(jvp(layer_1))/attention/enter_sublayer_input/psum", ("1", "attention")),
        ("jit(f)/launch_sublayer_output/previous/psum", ("last", "")),
        ("jit(f)/layer_0/attention/enter_sublayer_input/all_gather", ("0", "attention")),
        ("jit(f)/layer_3/attention/enter_sublayer_input/following/all_gather", ("3", "mlp")),
        ("jit(f)/layer_3/mlp/enter_sublayer_input/following/all_gather", ("4", "attention")),
        ("jit(f)/layer_3/joint/enter_sublayer_input/following/all_gather", ("4", "joint")),
        ("jit(f)/enter_sublayer_input/following/all_gather", ("last", "")),
        ("jit(f)/transpose(jvp(layer_3))/gather_weights/all_gather", ("3", "")),
        ("jit(f)/jit(_splash_attention)/psum", ("", "")),
    ],
)
def test_owner(op_name, owner):
    assert judge.owner(op_name) == owner


@pytest.mark.parametrize(
    "layers, words",
    [
        ("3", "3"),
        ("31", "3, 1"),
        ("3201", "0-3"),
        ("420", "3 layers of 0-4"),
        ("1123", "1-3"),
        (["0-1", "2"], "0-1, 2"),
    ],
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
        found = schedule.audit(*asked)
        (only,) = found.reductions
        assert (only.status, only.layer, only.sublayer) == (Status.SYNCHRONOUS, "", "")
        assert (only.collective.bytes, only.collective.axes) == (64 * 4, ("tensor",))
    with pytest.raises(AssertionError, match="1 of 1 reductions are not hidden, 0 allowed"):
        schedule.assert_hidden(jitted, x, exposed=0)


def test_meshes_of_targets():
    mesh = schedule.make_mesh("cpu:8", tensor=4, data=2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "tensor": 4}
    for data, tensor in ((2, 8), (9, None)):
        few = f"cpu:8 has 8 devices, too few for data {data} x tensor {tensor or 1}"
        with pytest.raises(UserError, match=few):
            schedule.make_mesh("cpu:8", tensor=tensor, data=data)
    with pytest.raises(UserError, match="needs JAX_NUM_CPU_DEVICES=16"):
        schedule.make_mesh("cpu:16")
    with pytest.raises(UserError, match="12 GPUs do not fill hosts of 8"):
        targets._hosts(12)
    assert [targets._hosts(n) for n in (1, 4, 8, 16)] == ["1x1x1", "1x1x4", "1x1x8", "1x2x8"]
