"""A gradual conversion: each layer's ladder fraction, 0 (standard) to 1 (ladder), by the step; and
the wire between.

A ladder's sublayer i reads a stream without the newest d_i outputs; a standard one waits for them.
In between, with the ladder fraction f from 0 (standard) to 1 (ladder),

    x_i = x_{i-1} + AR(h_i(x_{i-1-d} + (1 - f) (x_{i-1} - x_{i-1-d})))

and for a fresh ladder, whose input holds the rank's own newest partial p, the last factor is (AR(p)
- p). At both ends it is the topology's own arithmetic. While f may be below 1 a sublayer waits for
every all-reduce: none is hidden, no barrier is needed to keep them apart, and so the wire has an
`advance` of its own. A farskip's shared expert has an all-reduce of its own, because its input may
wait for attention's.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ladder_jax.config import ConversionConfig, Pace
from ladder_jax.residual import AllReduce, State, Step, Sublayer, Topology, add
from ladder_jax.residual.recurrence import Sums
from ladder_jax.scopes import PREVIOUS

type Terms = dict[str, jax.Array]  # of a step: what it computes of its number, and of its loss

LADDER_FRACTION = "ladder_fraction"
"""The name, among what a step computes of its number, of each layer's [L]."""


def ladder_fraction(step: jax.Array, *, topology: Topology, config: ConversionConfig) -> jax.Array:
    """Float32 [L] for step number `step`, counted from 0.

    The ladder layers are divided into groups, the topmost first, each with an equal share of the
    steps. During its share a group ramps from 0 to 1, or jumps to 1 at the beginning. Layers of a
    hybrid that stay standard have 1: their input is the same either way.
    """
    ladder = [n for n, steps in enumerate(topology.layers) if any(step.delay for step in steps)]
    group = np.full(topology.num_layers, -1)
    for index, members in enumerate(np.array_split(ladder[::-1], config.groups)):
        group[members] = index
    span = config.steps / config.groups
    done = (step.astype(jnp.float32) - jnp.asarray(group * span, jnp.float32)) / span
    fraction = jnp.clip(done, 0, 1) if config.pace is Pace.RAMP else (done >= 0).astype(jnp.float32)
    return jnp.where(jnp.asarray(group) < 0, 1.0, fraction)


@dataclasses.dataclass(frozen=True)
class Annealed(AllReduce):
    """Steps with a delay, `ladder_fraction` (a float32 scalar) of the way from standard; others are
    as they were.
    """

    ladder_fraction: jax.Array

    def advance(self, state: State, step: Step, sublayers: Sequence[Sublayer]) -> State:
        if not step.delay:
            return super().advance(state, step, sublayers)
        own = state.partial
        launched = step.launched(state.sums, self.reduce(own, PREVIOUS))
        read = step.read(launched)
        fading = _share(launched[len(read) :], 1 - self.ladder_fraction)
        entered = self.enter(step, add(add(state.residual, read), fading), sublayers)
        if step.fresh:
            entered = add(entered, _share((own,), self.ladder_fraction))
        if step.early:
            early = self.reduce(self.partial(step.early, entered, sublayers))
            launched = (add(launched[0], (early,)), *launched[1:])
        partial = self.partial(step.sublayers, entered, sublayers)
        return self.settled(step, state.residual, launched, partial)


def _share(sums: Sums, factor: jax.Array) -> Sums:
    return tuple(None if one is None else (one * factor).astype(one.dtype) for one in sums)
