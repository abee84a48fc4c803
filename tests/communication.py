"""What an optimised program communicates: how many all-reduces, of how many operands, in which
loop.
"""

import dataclasses
import re

import jax

from ladder_jax import parallel
from ladder_jax.config import Loop
from ladder_jax.parallel import collectives
from ladder_jax.scopes import ENTER, LAUNCH
from tests import cases

NUM_LAYERS = 4
# All-reduces in all layers. Desync-3 reduces after sublayers 3, 6 and the last.
IN_ALL = {
    **{name: 2 * NUM_LAYERS for name in cases.TOPOLOGIES},
    **{
        name: NUM_LAYERS
        for name in ("parallel", "parallel-shared-norm", "parallel-ladder", "desync-2")
    },
    "hybrid-parallel-ladder": 2 * NUM_LAYERS - 2,
    "desync-3": 3,
    "no-communication": 0,
}

TENSOR = "{'tensor'}", "{'kv','group'}"  # the second where ranks share key/value heads


def lines(text):
    """(computation, line) of every all-reduce."""
    computation = None
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = "entry" if line.startswith("ENTRY") else header[1]
        if re.search(r" all-reduce(-start)?\(", line):
            yield computation, line


def all_reduces(text):
    """(direction, computation, operands, over the tensor axis alone) of every sublayer's
    all-reduce.
    """
    found = []
    for computation, line in lines(text):
        names = re.search(r'op_name="([^"]*)"', line)
        direction = next((n for n in (LAUNCH, ENTER) if names and n in names[1]), None)
        if direction:
            operands = re.search(r"all-reduce(?:-start)?\(([^)]*)\)", line)[1].count("%")
            found.append((direction, computation, operands, any(axes in line for axes in TENSOR)))
    return found


def check(text, *, name, loop, directions=(LAUNCH,)):
    """The sublayers' all-reduces are as many as the topology needs, in the loop over layers, and
    none was merged.
    """
    found = all_reduces(text)
    assert {direction for direction, *_ in found} <= set(directions)
    assert all(operands == 1 for _, _, operands, _ in found), "merged"
    assert all(tensor for *_, tensor in found), "over another axis"
    # what differs from layer to layer has several loops
    alike = loop is Loop.SCAN and not name.startswith("hybrid") and name != "desync-3"
    for direction in directions:
        places = [computation for d, computation, *_ in found if d == direction]
        inside = [computation for computation in places if computation != "entry"]
        if loop is Loop.UNROLLED:
            assert len(places) == IN_ALL[name]
            assert not inside
        elif alike:
            assert len(inside) == IN_ALL[name] / NUM_LAYERS
            assert len(set(inside)) <= 1
    # The last sublayer's may stand after the loop.
    assert not alike or len([c for _, c, *_ in found if c == "entry"]) <= 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Started:
    """A started all-reduce, on which XLA aborts for a CPU: here it is made when it is awaited."""

    x: jax.Array
    axes: tuple[str, ...] = dataclasses.field(metadata=dict(static=True))

    def done(self):
        return parallel.all_reduce(self.x, self.axes)


def start_on_a_cpu(monkeypatch):
    """The all-reduces that are started from now on, as they are traced."""
    started = []
    monkeypatch.setattr(collectives, "HALVES", ("cpu",))
    monkeypatch.setattr(
        collectives, "_psum_start", lambda: lambda x, axes: started.append(x) or Started(x, axes)
    )
    return started
