"""Report how a program's communication is hidden: classify each collective, and measure the compute
in its window. `audit` takes a function, yours or the library's, or a compiled text; `assert_hidden`
is for test suites.

The classes are the sublayers' reductions over the tensor axis (with sequence parallelism, both
halves of each), the gathers of layers' weights and the reduce-scatters of their gradients over the
fsdp axis, and all others. The class follows from the library's named scope; of a collective that
the compiler generated, from its kind and its mesh axes.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ladder_jax import scopes
from ladder_jax.errors import UserError, described, whole
from ladder_jax.schedule import collectives, hlo, rings
from ladder_jax.schedule.collectives import Collective
from ladder_jax.schedule.cost import Costs, sublayer_of
from ladder_jax.schedule.grouped import Experts
from ladder_jax.schedule.hlo import Program
from ladder_jax.schedule.report import Report, Role, Transfer
from ladder_jax.scopes import DATA, ENTER, FOLLOWING, FSDP, GATHER, LAUNCH, PREVIOUS, SCATTER

NAMES_IN_KEY = "jax_compilation_cache_include_metadata_in_key"
REPLICATED_GRADIENTS = "gradients of norm gains and other replicated weights"
DATA_PARALLEL_GRADIENTS = "data-parallel gradients"
PURPOSES = {  # by named scope; the first scope that the name contains counts
    scopes.CHOICE: "choice of the token",
    scopes.EMBEDDING: "embedding",
    scopes.DIVERGENCE: "distillation",
    scopes.LOSS: "loss",
    scopes.QK_NORM: "query and key norms over all heads",
    scopes.HEAD: "gradient of the head's input",
    scopes.GRADIENT_NORM: "gradient norm",
    scopes.SHARED_GRADIENTS: REPLICATED_GRADIENTS,
    scopes.DATA_GRADIENTS: DATA_PARALLEL_GRADIENTS,
    GATHER: "weights outside the layers",
    SCATTER: "gradients of weights outside the layers",
}


def audit(fn_or_compiled: Any, *args: Any) -> Report:
    """Report which of a program's reductions the compiler hides under compute.

        options = topology.compile_options(mesh, phase="prefill")  # of residual.topology(...)
        jitted = jax.jit(jax.shard_map(fn, ...), compiler_options=options)
        schedule.audit(jitted, x, w)                      # or their jax.ShapeDtypeStructs with shardings
        schedule.audit(jitted.lower(x, w).compile())      # the same
        schedule.audit(compiled.as_text())                # the same

    A plain `jax.jit` does not set these options; without them some compilers (v5p's) hide nothing.
    Arguments on `schedule.make_mesh("v5p:2x2x2", tensor=8)` compile the function for v5p on a
    machine without TPUs.

    In a function built on `ladder_jax.residual`, `Report.reductions` are those that its topology
    launched, and `Report.others` are all other collectives, such as the all-reduces of norm gains'
    gradients. In any other function `reductions` are all all-reduces and reduce-scatters, on every
    mesh axis. The window of a reduction is measured in sublayers: by the program's matmul FLOPs over
    the number of its reductions.
    """
    text = (
        fn_or_compiled if isinstance(fn_or_compiled, str) else _compiled_text(fn_or_compiled, args)
    )
    return read(hlo.parse(text))


def assert_hidden(fn_or_compiled: Any, *args: Any, exposed: int = 1) -> Report:
    """Raise AssertionError, with the report, if more than `exposed` reductions are not hidden, if any
    is merged, if there is none, or if the program has a collective in an unknown form.

    The default is 1, because no compute follows a program's last reduction. Arguments and result
    are those of `audit`.
    """
    exposed = whole("exposed", exposed, least=0)
    report = audit(fn_or_compiled, *args)
    counted = report.all_reduces and not report.unknown
    if not counted or report.merged or report.exposed > exposed:
        raise AssertionError(
            f"{report!r}\nallowed: {exposed} exposed, none merged or of unknown form"
        )
    return report


def _compiled_text(program: Any, args: tuple) -> str:
    import jax  # here, as the commands that import this file read only texts

    staged = hasattr(program, "as_text")  # lowered or compiled, by jax or by flax.nnx
    if not staged and not callable(program):
        raise UserError(
            f"audit takes a function, a compiled one, or its text, not {described(program)}"
        )
    with _names_in_cache_key():
        if hasattr(program, "compile"):  # lowered, or a `parallel.Compiled`
            program = program.compile() if staged else program.compile(*args)
        elif not staged:
            jitted = program if hasattr(program, "lower") else jax.jit(program)
            program = jitted.lower(*args).compile()
        return program.as_text()


@contextlib.contextmanager
def _names_in_cache_key() -> Iterator[None]:
    """Within this context, jax's persistent cache distinguishes programs by their named scopes too.

    By default its keys leave names out: a lookup may return a program of the same operations in
    other named scopes.
    """
    import jax

    previous = getattr(jax.config, NAMES_IN_KEY)
    jax.config.update(NAMES_IN_KEY, True)
    try:
        yield
    finally:
        jax.config.update(NAMES_IN_KEY, previous)


def read(
    program: Program,
    *,
    sublayer_flops: Mapping[str, float] = {},
    experts: Experts | None = None,
    launched_only: bool = False,
) -> Report:
    """The report of a scheduled program.

    `Report.reductions` are those that a residual topology launched; if there are none, all
    all-reduces and reduce-scatters, unless the program is known to have a topology
    (`launched_only`).

    sublayer_flops: forward matmul FLOPs on one device of one "attention", "mlp" and "joint" (both)
        sublayer. Without it, a window is measured against the program's matmul FLOPs over its
        number of reductions.
    experts: the model's (see `cost.Costs`).
    """
    flops = sublayer_flops
    costs = Costs(program, experts=experts)
    found = rings.joined(collectives.find(costs), costs=costs)
    ours = found if flops else []  # programs whose layers may gather their weights
    gathers = [c for c in ours if _moves_layer_weights(c, GATHER, "all-gather")]
    scatters = [c for c in ours if _moves_layer_weights(c, SCATTER, "reduce-scatter")]
    reduced = [c for c in found if LAUNCH in c.op_name or ENTER in c.op_name]
    if not reduced and not launched_only:
        sums = [c for c in found if c.kind in ("all-reduce", "reduce-scatter")]
        reduced = [c for c in sums if c not in scatters]
    # A collective over a single device moves nothing.
    others = [c for c in found if c not in reduced + gathers + scatters and c.ranks != 1]
    total = costs.flops_of(program.entry.instructions).total()
    mean = total / max(1, sum(c.executions * c.operands for c in reduced))
    default = flops.get("attention", mean)

    def judged(role: Role, collective: Collective) -> Transfer:
        """Its window is in forward sublayers, or, backward, where those are known, in twice their
        FLOPs.
        """
        name = collective.op_name
        # the compiler's own are gradients'
        backward = "transpose(" in name or (role is Role.SHARDS and not name)
        window = sum(
            (count / flops.get(sublayer, default) for sublayer, count in collective.flops.items()),
            0.0,
        )
        if role is Role.REDUCTION and collective.kind == "all-to-all":
            # beside attention, on TPUs often up to its kernel's end
            window += collective.scores / default
        if backward and flops:
            window /= 2
        phrase = purpose(collective) if role is Role.OTHER else ""
        return Transfer(collective, role, *owner(name), backward, window, phrase)

    every = lambda role, group: tuple(judged(role, one) for one in group)
    reductions = every(Role.REDUCTION, reduced)
    hidden = [r.collective for r in reductions if r.hidden]
    beside = collectives.beside(hidden, costs=costs)
    return Report(
        reductions=reductions,
        others=every(Role.OTHER, others),
        step_cycles=costs.total_cycles,
        flops=total,
        hidden_cycles=sum(trips * costs.cycles(one) for trips, one in beside)
        if costs.total_cycles
        else None,
        gathers=every(Role.SHARDS, gathers),
        scatters=every(Role.SHARDS, scatters),
        unknown=tuple(collectives.unknown(program)),
    )


def _moves_layer_weights(collective: Collective, scope: str, kind: str) -> bool:
    """Whether it moves a layer's weights or gradients: by its named scope or, if it has no name, by
    kind and axis.
    """
    if not collective.op_name:
        return collective.kind == kind and collective.axes == (FSDP,)
    return scope in collective.op_name and owner(collective.op_name)[0] != ""


def owner(op_name: str) -> tuple[str, str]:
    """(layer, sublayer) whose output or input the operation of that name reduces, scatters or
    gathers.
    """
    layers = re.findall(r"layers?_(\d+)(?:_to_(\d+))?", op_name)
    first, last = layers[-1] if layers else ("", "")
    layer = f"{first}-{last}" if last else first
    sublayer = sublayer_of(op_name)
    following = f"{ENTER}/{FOLLOWING}" in op_name
    if not following and f"{LAUNCH}/{PREVIOUS}" not in op_name:
        return layer, sublayer
    if not sublayer:
        return "last", ""
    own, other, step = ("attention", "mlp", 1) if following else ("mlp", "attention", -1)
    if sublayer == own:
        return layer, other
    if first and not last:
        layer = str(int(first) + step)
    return layer, "joint" if sublayer == "joint" else own


def purpose(collective: Collective) -> str:
    """The purpose of a collective; of one that the compiler merged, all purposes, separated by
    commas.

    A compiler writes the names of merged collectives as `(a:b)`, or keeps the first one only.
    """
    name = collective.op_name
    named = []
    for part in name.split(":"):
        named += [phrase for scope, phrase in PURPOSES.items() if scope in part][:1]
    if named:
        return ", ".join(dict.fromkeys(named))
    if "transpose(" in name and collective.kind == "all-reduce":
        # it sums the gradient of an array that is equal on all ranks
        data_axes = collective.axes and set(collective.axes) <= {DATA, FSDP}
        return DATA_PARALLEL_GRADIENTS if data_axes else REPLICATED_GRADIENTS
    generated = {"all-gather": GATHER, "reduce-scatter": SCATTER}
    if not name and collective.axes == (FSDP,) and collective.kind in generated:
        return PURPOSES[generated[collective.kind]]
    return f"other: {name or collective.name}"
