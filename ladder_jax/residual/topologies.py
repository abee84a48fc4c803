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
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ladder_jax.config import Launch, Loop, ModelConfig, Phase, layer_indices, parse_residual
from ladder_jax.config.fields import member
from ladder_jax.errors import UserError, described, wrong_type
from ladder_jax.parallel.collectives import Axes
from ladder_jax.parallel.compiled import compile_options
from ladder_jax.parallel.compiler_options import Overlap, Split, Traits
from ladder_jax.residual.recurrence import AllReduce, State, Step
from ladder_jax.residual.wires.desync import Desynced, Silent

ROUTED, SHARED = 1, 2  # of a farskip layer's sublayers


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
        shared = (
            "\n  attention and MLP of a layer read one norm's output" if self.shared_norm else ""
        )
        return _words(self.layers) + shared

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
        if not hasattr(mesh, "devices"):
            raise wrong_type("mesh", mesh, Mesh)
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
                steps.append(Desynced((index % 2,), phase=index % self.desync, sync=sync))
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
    if not isinstance(config, ModelConfig):
        raise wrong_type("config", config, ModelConfig)
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
    if not isinstance(topology, Topology):
        raise wrong_type("topology", topology, Topology)
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
    # Plan extra layers, so that the last real layers have the same counts as the others and one
    # scan body serves all; `flush` adds what the last layer leaves pending.
    extra = 1 + max(topology.delays)
    kinds = list(zip(itertools.batched(topology.delays, 2), topology.joint, topology.fresh))
    kinds += kinds[-1:] * extra
    layers = [((0, 1),) if joint else ((0,), (1,)) for _, joint, _ in kinds]

    # each step's sublayer
    firsts = [2 * layer + group[0] for layer, groups in enumerate(layers) for group in groups]
    step_at = {first: index for index, first in enumerate(firsts)}
    delays = list(itertools.chain(*(delays for delays, _, _ in kinds)))
    joined = len(layers[0][0])
    in_steps = []
    for index, first in enumerate(firsts):
        delay = delays[first]
        read = first - delay
        # A read before the first sublayer counts layers of the first one's kind, whose outputs are
        # zero.
        step = step_at.get(read) if read >= 0 else -(-read // joined)
        if step is None:
            raise UserError(f"delay {delay} reads the middle of a layer whose sublayers are joint")
        in_steps.append(index - step)

    pending = [0] * (len(firsts) + 1)
    for index in reversed(range(len(firsts))):
        pending[index] = max(in_steps[index], pending[index + 1] - 1)
    counts = iter(zip(pending, in_steps, pending[1:]))
    planned = []
    for groups, fresh in zip(layers, topology.fresh):
        planned.append(tuple(Step(group, *next(counts), fresh) for group in groups))
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


def _words(layers):
    """A few lines: the number of all-reduces, and what the layers of each kind read."""
    steps = [step for layer in layers for step in layer]
    count = sum(step.reduces for step in steps)
    kinds: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(_layer_words(layer), []).append(number)
    lines = [f"Topology of {len(layers)} layers, {2 * len(layers)} sublayers, {count} all-reduces"]
    for text, of_kind in kinds.items():
        noun = "layers" if len(of_kind) > 1 else "layer"
        lines.append(f"  {noun} {_ranges(of_kind)}: {text}")
    return "\n".join(lines)


def _layer_words(layer):
    first, *second = map(_step_words, layer)
    if not second:
        return f"attention and MLP read {first}; one all-reduce for both"
    both = f"attention and MLP read {first}"
    return both if [first] == second else f"attention reads {first}; MLP reads {second[0]}"


def _step_words(step):
    if isinstance(step, Desynced):
        return "their rank's own stream, which each all-reduce makes equal on all ranks"
    if isinstance(step, Silent):
        return "their rank's own stream: no rank sees the others'"
    if step.delay == 0:
        return "every output before them"
    late = "the newest output" if step.delay == 1 else f"the {step.delay} newest outputs"
    if step.early:
        return f"all but {late}, all-reduced meanwhile with the shared expert's"
    if step.fresh:
        return f"all but the other ranks' part of {late}, all-reduced meanwhile"
    return f"all but {late}, all-reduced meanwhile"


def _ranges(numbers):
    """0-3, 6, 8-9; shortened after a few."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    shown = ["-".join(map(str, run)) for run in runs]
    text = ", ".join(shown[:8])
    return f"{text}, ... ({len(numbers)} in all)" if len(shown) > 8 else text
