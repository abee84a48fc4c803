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

NUM_LAYERS = 4
# All-reduces a layer and direction, where all layers do the same.
A_LAYER = {
    "standard": 2,
    "ladder": 2,
    "ladder-2": 2,
    "ladder-3": 2,
    "ladder-fresh": 2,
    "parallel": 1,
    "parallel-shared-norm": 1,
    "parallel-ladder": 1,
    "desync-2": 1,
    "no-communication": 0,
}
# In all layers; two of hybrid-parallel-ladder's reduce once, and desync-3 reduces after sublayers
# 3, 6 and the last.
IN_ALL = {
    **{name: count * NUM_LAYERS for name, count in A_LAYER.items()},
    **{
        f"hybrid-{name}": 2 * NUM_LAYERS
        for name in ("last-2", "list", "delay-2", "delay-3-first", "fresh")
    },
    "hybrid-parallel-ladder": 2 * NUM_LAYERS - 2,
    "desync-3": 3,
}

TENSOR = "{'tensor'}", "{'kv','group'}"  # the second where ranks share key/value heads


def all_reduces(text: str) -> list[tuple[str, str, int, bool]]:
    """(direction, computation, operands, over the tensor axis alone) of every sublayer's
    all-reduce.
    """
    found, computation = [], None
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = "entry" if line.startswith("ENTRY") else header[1]
        if not re.search(r" all-reduce(-start)?\(", line):
            continue
        names = re.search(r'op_name="([^"]*)"', line)
        direction = next((n for n in (LAUNCH, ENTER) if names and n in names[1]), None)
        if direction:
            operands = re.search(r"all-reduce(?:-start)?\(([^)]*)\)", line)[1].count("%")
            found.append((direction, computation, operands, any(axes in line for axes in TENSOR)))
    return found


def check(text: str, *, name: str, loop: Loop, directions: tuple[str, ...] = (LAUNCH,)) -> None:
    """The sublayers' all-reduces are as many as the topology needs, in the loop over layers, and
    none was merged.
    """
    found = all_reduces(text)
    assert {direction for direction, *_ in found} <= set(directions)
    assert all(operands == 1 for _, _, operands, _ in found), "merged"
    assert all(tensor for *_, tensor in found), "over another axis"
    for direction in directions:
        places = [computation for d, computation, *_ in found if d == direction]
        inside = [computation for computation in places if computation != "entry"]
        if loop is Loop.UNROLLED:
            assert len(places) == IN_ALL[name] and not inside
        elif name in A_LAYER:
            assert len(inside) == A_LAYER[name] and len(set(inside)) <= 1
    # The last sublayer's may stand after the loop.
    assert (
        loop is Loop.UNROLLED
        or name not in A_LAYER
        or len([c for _, c, *_ in found if c == "entry"]) <= 1
    )


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
