"""The schedule's reader against what real compilers wrote (tests/hlo)."""

import collections
import re
from dataclasses import replace

import pytest

from ladder_jax import schedule
from ladder_jax.schedule import cost, hlo, judge, rings
from ladder_jax.schedule.report import Status
from tests.hlo import RANKS, SUBLAYERS, UNROLLED, D, F, T, parsed, text

LAST = "; the last one comes after all compute, so it is always exposed"
SYNCHRONOUS = "; exposed: 6 synchronous"
BARE = "beside too little compute"
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
    ("tpu7x-standard", (6, 6, 0, 0), f"; exposed: 6 {BARE}"),
    ("v5p-sync", (6, 0, 0, 0), SYNCHRONOUS),
    ("h100-tiny", (1, 1, 0, 0), f"; exposed: 1 {BARE}"),
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
            r"0 of 6 all-reduces hidden\nexposed: 6 synch(.|\n)*allowed: 1 exposed",
        ),
        ("tpu7x-standard", 1, "too little compute"),
        ("h100-tiny", 0, "too little compute"),
        ("h100-naive", SUBLAYERS, "6 were merged by the compiler"),
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
    started = schedule.audit(text("h100-halves")).reductions[:-1]
    assert all(r.collective.op_name.endswith("/psum_invariant_start") for r in started)


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
    assert cost.Costs(program).bytes_moved == cost.Costs(parsed(name)).bytes_moved


def read(name, *, ranks, ff=F):
    """As the library's own programs are read: by scopes."""
    one = 2 * 2 * T * D * ff / ranks
    return judge.read(parsed(name), sublayer_flops={"attention": one, "mlp": one})


@pytest.mark.parametrize(
    "name, ff",
    {
        "h100-split": F,
        "tpu7x-split": 4 * F,
        "v5p-split": 4 * F,
    }.items(),
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
    assert (
        found.verdict
        == f"0 of {2 * SUBLAYERS} collectives hidden; exposed: {2 * SUBLAYERS} synchronous"
    )


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
        assert ring.axes == ("tensor",)
        assert (ring.ranks, len(ring.parts), ring.matmul) == (RANKS, 7, half)


def test_a_ring_is_hidden_only_if_each_of_its_messages_is():
    ring = read("h100-ring", ranks=RANKS).reductions[1].collective
    first, *others = ring.permutes

    def covered(share):
        """With so much of an n-th of the matmul beside the first message."""
        return of(replace(first, flops=cost.Flops(attention=share * ring.matmul / RANKS)), *others)

    of = lambda *permutes: rings.covered(replace(ring, permutes=permutes))
    assert of(first, *others)
    assert covered(0.5)
    assert not covered(0.49)
    assert not covered(0)
    assert not rings.covered(replace(ring, matmul=0.0))


def moved(transfers):
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
    found = read(name, ranks=4)
    whole = D * F // 4
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
