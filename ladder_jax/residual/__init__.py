"""Residual topologies: which sublayer reads which residual stream, and when its output is reduced.

A Transformer is a chain of sublayers h_1, h_2, ... (attention, MLP, attention, ...), each of which,
under tensor parallelism, yields a rank's *partial sum*; AR, the all-reduce, makes it whole. With
x_0 the embedding, one rule holds most topologies (Ladder Residual, arXiv 2501.06589, generalised):

    x_i = x_{i-1} + AR(h_i(x_{max(0, i-1-d_i)}))

where d_i is the *delay* of sublayer i. Delay 0 is the standard Transformer: h_i waits for
AR(h_{i-1}).
Delay 1 is Ladder: h_i reads a stream that does not hold h_{i-1}'s output yet, so that output is
all-reduced while h_i computes. As code this is software pipelining over a small `State`:

    launch   summed = all_reduce(partial)           needs nothing that this step computes
    compute  fresh  = sublayer(residual)            reads a residual without `summed`: the overlap
    await    fresh, summed = optimization_barrier((fresh, summed))
    carry    residual + summed, fresh

and `flush` adds what is left after the last sublayer. Two things make the overlap survive the
compiler. The partial is carried *un-reduced*, so that in a `lax.scan` an all-reduce and the compute
that hides it stand in one loop body. And the barrier chains consecutive all-reduces, which are
independent otherwise and would be merged into one with nothing left to hide it.

The backward pass is the same pipeline the other way round: there a sublayer's *input* has the
gradient that must be reduced. It has a barrier of its own, and the forward barrier none in it: the
transpose of either would make one direction wait for what the other only has to keep apart. What
each direction does was chosen by compiled schedules (`ladder-jax overlap`, experiments/overlap):

    direction   all-reduce of           launched         barrier over               because otherwise
    forward,    a sublayer's output,    in the next      own output, newest sum     the two of a layer are merged;
    prefill,    carried un-reduced      step, or turn                               a scan's last one cannot leave
    decode                              of the scan                                 its turn, and is exposed
    backward    the gradient of a       in its own       that gradient, those of    XLA runs the earlier sublayer
                sublayer's input        step; a scan's   the residual and of the    first and leaves nothing under
                                        last hides       newest output              this one (so it did on v5p)
                                        under weight
                                        gradients

Prefill and decode need no backward pass, and where the compiler has all-reduces in two halves a
step holds both in their place (`Launch.EXPLICIT`; see wires/async_all_reduce.py), so that a whole
sublayer is between them:

    launch   started = start(partial)
             gain, started = optimization_barrier((gain, started))        the sublayer's norm's, which is small
    compute  fresh = sublayer(residual, gain)
    await    fresh, started = optimization_barrier((fresh, started))
             fresh, summed = optimization_barrier((fresh, started.done()))

Both loop forms use the same steps. Carrying the backward's gradient un-reduced too was not needed:
in a scan's body both of its all-reduces are hidden on every target.

A sublayer never communicates; the topology owns every collective. For layers of your own, inside
`jax.shard_map` over an axis named "tensor" (`x` is [B, T, D], equal on all ranks of that axis):

    topology = residual.topology("ladder", num_layers=4)
    x = residual.run(topology, blocks, x, params=params)

`blocks` makes a layer's two sublayers, (attention, MLP), of its parameters, which stand stacked
[L, ...] in `params`. A sublayer, normalisation included, is a function from a rank's [B, T, D]
input to its partial sum [B, T, D]: it holds no `psum`, which is refused, and adds an output bias by
`on_one_rank`. `Stack` is the same as a Flax module, and docs/guides/your_model.md makes a Ladder of
a whole model. `run` is these steps, in a loop of your own:

    state = residual.begin(x, topology=topology, axes=("tensor",))
    for block, steps in zip(blocks, topology.layers):
        for step in steps:
            state = step(state, (block.attention, block.mlp), axes=("tensor",))
    x = residual.flush(state, axes=("tensor",))

A `lax.scan` over layers of equal steps carries `residual.fill(state, steps, axes=...)`: zeros where
nothing is pending.

What a compiler hides depends on its options, too: `topology.compile_options(mesh,
phase="train")` are those for `jax.jit(..., compiler_options=...)`.

In reading order: topologies.py, the values; recurrence.py, what a step does, over the plain wire;
loop.py, the loop over layers; stack.py, for layers of your own. A *wire* is how an output crosses
the ranks, one a file in wires/:

    AllReduce         one all-reduce a step                 recurrence.py
    AsyncAllReduce    the same, started and awaited apart   wires/async_all_reduce.py   prefill and decode
    SequenceParallel  a reduce-scatter and an all-gather    wires/sequence.py           as rings of permutes, too
    Exchange          and two all-to-alls around experts    wires/exchange.py
    Desync            one all-reduce in n steps             wires/desync.py
    NoCommunication   none, for timing                      wires/desync.py
    Interleaved       any of the first three, beside the    interleave.py               training and prefill
                      other half of the batch
"""

from ladder_jax.residual.loop import EXPERTS as EXPERTS, MATMUL as MATMUL
from ladder_jax.residual.recurrence import (
    REDUCED as REDUCED,
    AllReduce as AllReduce,
    Normed as Normed,
    State as State,
    Step as Step,
    Sublayer as Sublayer,
    add as add,
)
from ladder_jax.residual.stack import Stack as Stack, on_one_rank as on_one_rank, run as run
from ladder_jax.residual.topologies import (
    Topology as Topology,
    begin as begin,
    fill as fill,
    flush as flush,
    of_model as of_model,
    topology as topology,
)
from ladder_jax.residual.wires.desync import Desynced as Desynced, Silent as Silent
