"""Topologies as values, by name, and the steps that follow from their delays.

FarSkip-Collective (arXiv 2511.11505): a ladder whose shared expert is reduced together with
attention.

With a_k attention, s_k the shared expert and r_k the routed experts of layer k, and x_k the stream
after it:

    a_k = Attn(x_{k-1} - r_{k-1});   s_k, r_k = Shared(x_{k-1}), Routed(x_{k-1});   x_k = x_{k-1} + a_k + s_k + r_k

Both of a layer's all-reduces overlap compute: that of a_k + s_k the routed experts, that of r_k the
next attention. A layer has three sublayers, (attention, routed experts, shared expert). Without a
shared expert it is `ladder`.

A first layer without experts is one with r_k = 0, whose MLP is its shared expert: attention and MLP
read x_{k-1} and are reduced together, as in `parallel`.
"""

import dataclasses
import itertools
import numbers
import textwrap
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ladder_jax.config import Launch, Loop, ModelConfig, Phase, layer_indices, parse_residual
from ladder_jax.config.fields import check, check_type, member
from ladder_jax.errors import UserError, described
from ladder_jax.parallel.collectives import Axes
from ladder_jax.parallel.compiled import compile_options
from ladder_jax.parallel.compiler_options import Overlap, Split, Traits
from ladder_jax.parallel.mesh import NamedMesh
from ladder_jax.residual.recurrence import AllReduce, State, Step, check_stream
from ladder_jax.residual.wires.desync import Desynced, Silent

ROUTED, SHARED = 1, 2  # of a farskip layer's sublayers
FLAGS = "desync", "silent", "shared_norm", "farskip"  # fields that a repr names


@dataclasses.dataclass(frozen=True)
class Topology:
    """A residual topology, as a value. Two are equal if they compute the same function in the same
    way.

    delays: d_i of sublayers 1..2L (attention, MLP, attention, ...).
    joint: for each layer, whether attention and MLP are summed before one all-reduce.
    fresh: for each layer, whether its sublayers read their rank's own newest partial.
    desync: the number of sublayers from one all-reduce to the next, where ranks drift apart in
        between; otherwise 0.
    silent: nothing is reduced.
    shared_norm: attention and MLP of a layer read one norm's output.
    farskip: a layer has three sublayers, (attention, routed experts, shared expert): see above.
    dense: of farskip, how many of the first layers have two, (attention, MLP).
    """

    delays: tuple[int, ...]
    joint: tuple[bool, ...]
    fresh: tuple[bool, ...]
    desync: int = 0
    silent: bool = False
    shared_norm: bool = False
    farskip: bool = False
    dense: int = 0

    def __post_init__(self):
        sizes = len(self.delays), len(self.joint), len(self.fresh)
        if not self.joint or sizes != (2 * len(self.joint), len(self.joint), len(self.joint)):
            raise UserError(
                f"delays [2L], joint [L] and fresh [L] must be of one number of layers L, not {sizes}"
            )
        if not all(isinstance(delay, numbers.Integral) and delay >= 0 for delay in self.delays):
            raise UserError(f"delays must be whole numbers of at least 0, not {self.delays}")

    def __repr__(self) -> str:
        """The layers' delays, equal ones in a row together and shortened where there are many; and
        the fields that are set.
        """
        steps = [step for layer in self.layers for step in layer]
        count = sum(step.reduces for step in steps)
        runs = itertools.groupby(itertools.batched(self.delays, 2))
        delays = ", ".join(f"{len(list(run))} x {delay}" for delay, run in runs)
        delays = textwrap.shorten(delays, 200, placeholder=" ...")
        fields = ["fresh"] if any(self.fresh) else []
        fields += [name for name in FLAGS if getattr(self, name)]
        words = [f"{self.num_layers} layers", f"{count} all-reduces", f"delays {delays}", *fields]
        return f"Topology of {', '.join(words)}"

    @property
    def num_layers(self) -> int:
        return len(self.joint)

    @property
    def overlap(self) -> Overlap:
        """Whether some all-reduce can overlap a sublayer: the best compiler options depend on
        it.
        """
        return (
            Overlap.HIDES
            if any(step.delay for steps in self.layers for step in steps)
            else Overlap.WAITS
        )

    def compile_options(
        self,
        mesh: Mesh,
        *,
        phase: Phase | str,
        loop: Loop | str = Loop.SCAN,
        sequence_parallel: bool = False,
    ) -> dict[str, Any]:
        """For `jax.jit(..., compiler_options=...)`: what lets the compiler for `mesh` hide this
        topology's all-reduces.

        phase: what the program does: "train", "prefill" (a forward pass over many tokens) or
            "decode" (one token a row). loop: "scan" or "unrolled". A mesh with an axis "fsdp" of
            more than one rank splits weights over it.
        """
        check_type("mesh", mesh, Mesh, NamedMesh)
        phase = member(Phase, "phase", phase)
        loop = member(Loop, "loop", loop)
        splits = {Split.WEIGHTS: mesh.shape.get("fsdp", 1) > 1, Split.SEQUENCE: sequence_parallel}
        split = frozenset(what for what, is_split in splits.items() if is_split)
        return compile_options(mesh, traits=Traits(self.overlap, phase, loop, split))

    @property
    def layers(self) -> tuple[tuple[Step, ...], ...]:
        """For each layer, the steps that compute it: two, or one where attention and MLP are
        joint.
        """
        if self.silent:
            return ((Silent((0,)), Silent((1,))),) * self.num_layers
        if self.desync:
            steps = []
            count = 2 * self.num_layers
            for index in range(count):
                done = index + 1
                sync = done % self.desync == 0 or done == count
                steps.append(Desynced((index % 2,), phase=index % self.desync, reduces=sync))
            return tuple(itertools.batched(steps, 2))
        if self.farskip:
            return _farskip_layers(_delayed_layers(self), dense=self.dense)
        return _delayed_layers(self)

    def wire(self, axes: Axes, *, launch: Launch = Launch.CHAINED) -> AllReduce:
        """How its outputs cross the ranks of `axes` on streams that are whole on each of them."""
        plain = self.layers[0][0].wire(axes)
        if launch is Launch.EXPLICIT and type(plain) is AllReduce:
            from ladder_jax.residual.wires.async_all_reduce import AsyncAllReduce

            return AsyncAllReduce(axes)
        return plain


def topology(
    name: str, *, num_layers: int, ladder_layers: str | int | Sequence[int] | None = None
) -> Topology:
    """The topology called `name` (`config.RESIDUALS`, EXPERT_RESIDUALS); raises UserError for an
    unknown one.

    With `ladder_layers` ("N", "i,j" or "all"; N, or [i, j]) only those layers are of that kind, the
    rest standard.
    """
    if not isinstance(num_layers, numbers.Integral) or num_layers < 1:
        raise UserError(
            f"num_layers must be a whole number of at least 1, not {described(num_layers)}"
        )
    parsed = parse_residual(name)
    of_kind = {
        "ladder": (parsed.number, parsed.number),
        "ladder-fresh": (1, 1),
        "parallel": (0, 1),
        "parallel-shared-norm": (0, 1),
        "parallel-ladder": (2, 3),
        "farskip": (1, 1),
    }.get(parsed.kind, (0, 0))
    chosen = range(num_layers)
    if ladder_layers is not None:
        chosen = layer_indices(ladder_layers, num_layers)
    layers = [layer in chosen for layer in range(num_layers)]
    check(
        parsed.reduces_every_output or all(layers),
        f"ladder_layers needs a residual whose layers stand alone, not {name!r}",
    )
    return Topology(
        delays=sum((of_kind if ladder else (0, 0) for ladder in layers), ()),
        joint=tuple(ladder and parsed.kind.startswith("parallel") for ladder in layers),
        fresh=tuple(ladder and parsed.kind == "ladder-fresh" for ladder in layers),
        desync=parsed.number if parsed.kind == "desync" else 0,
        silent=parsed.kind == "no-communication",
        shared_norm=parsed.kind == "parallel-shared-norm",
        farskip=parsed.kind == "farskip",
    )


def of_model(config: ModelConfig) -> Topology:
    check_type("config", config, ModelConfig)
    name = config.residual
    if name == "farskip" and not config.moe.shared_width:  # no shared expert to reduce early
        name = "ladder"
    found = topology(name, num_layers=config.num_layers, ladder_layers=config.ladder_layers)
    if found.farskip and config.moe.dense_layers:
        return _with_dense(found, layers=config.moe.dense_layers)
    return found


def begin(x: jax.Array, *, topology: Topology, axes: Axes) -> State:
    """The state before the first sublayer; `x` [B, T, D] is the embedding, equal on all ranks.

    axes: the mesh axes of the ranks, of the `jax.shard_map` that this stands in. Raises UserError
    for others. Nothing is pending, which None stands for: a `lax.scan` carries it only after
    `fill`.
    """
    check_type("topology", topology, Topology)
    check_stream(x)
    return topology.wire(axes).begin(x, topology.layers[0][0])


def fill(state: State, steps: Sequence[Step], *, axes: Axes, dtype: Any = None) -> State:
    """`state` for a `lax.scan` over layers of equal `steps`: zeros where nothing is pending yet.

    A carry has one structure in all turns, so the first turn reduces zeros, which an unrolled loop
    does not.
    dtype: of the sublayers' outputs, by default the stream's.
    """
    dtype = state.residual.dtype if dtype is None else dtype
    return steps[0].wire(axes).fill(state, steps, dtype=dtype)


def flush(state: State, *, axes: Axes) -> jax.Array:
    """The final residual stream [B, T, D]: everything still pending is reduced and added."""
    return AllReduce(axes).flush(state)


def _delayed_layers(topology):
    """Steps with their numbers of pending outputs, from delays counted in sublayers."""
    # Plan layers like the first one before it, whose outputs are zero and can be read; and layers
    # like the last one after it, so that the last real layers have the same counts as the others
    # and one scan body serves all: `flush` adds what the last layer leaves pending.
    more = 1 + max(topology.delays)
    kinds = list(zip(itertools.batched(topology.delays, 2), topology.joint, topology.fresh))
    kinds = kinds[:1] * more + kinds + kinds[-1:] * more
    delays = {}  # of each step, by its first sublayer
    for layer, (of_layer, joint, _) in enumerate(kinds):
        delays[2 * layer] = of_layer[0]
        if not joint:
            delays[2 * layer + 1] = of_layer[1]

    step_at = {sublayer: step for step, sublayer in enumerate(delays)}
    in_steps = []
    for sublayer, delay in delays.items():
        read = step_at.get(max(sublayer - delay, 0))
        if read is None:
            raise UserError(f"delay {delay} reads the middle of a layer whose sublayers are joint")
        in_steps.append(step_at[sublayer] - read)

    pending = [0] * (len(delays) + 1)
    for step in reversed(range(len(delays))):
        pending[step] = max(in_steps[step], pending[step + 1] - 1)
    counts = dict(zip(delays, zip(pending, in_steps, pending[1:])))
    planned = []
    for layer in range(more, more + topology.num_layers):
        _, joint, fresh = kinds[layer]
        groups = ((0, 1),) if joint else ((0,), (1,))
        planned.append(tuple(Step(own, *counts[2 * layer + own[0]], fresh) for own in groups))
    return tuple(planned)


def _farskip_layers(layers, *, dense=0):
    """A ladder's layers as FarSkip's; those of its layers that are standard add both kinds of
    experts up.

    dense: how many of the first have no experts, and stay as they are.
    """

    def experts(step: Step) -> Step:
        if step.delay == 0:
            return dataclasses.replace(step, sublayers=(ROUTED, SHARED))
        return dataclasses.replace(step, early=(SHARED,))

    return (*layers[:dense], *((attention, experts(mlp)) for attention, mlp in layers[dense:]))


def _with_dense(topology, *, layers):
    """`topology`, of farskip, whose first `layers` have no experts: nothing is pending after
    them.
    """
    delays = list(topology.delays)
    joint = list(topology.joint)
    for layer in range(layers):
        joint[layer] = delays[2 * layer] > 0
        delays[2 * layer] = 0
    if layers < len(joint):
        delays[2 * layers] = 0
    return dataclasses.replace(topology, delays=tuple(delays), joint=tuple(joint), dense=layers)
