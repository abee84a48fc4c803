"""Audit a compiled function, yours or the library's; and a check for test suites."""

from collections.abc import Mapping
from typing import Any

import jax

from ladder_jax import parallel
from ladder_jax.schedule import hlo, judge
from ladder_jax.schedule.named import own_names
from ladder_jax.schedule.report import Report, Status


def audit(fn_or_compiled: Any, *args: Any, sublayer_flops: Mapping[str, float] | None = None) -> Report:
    """What the compiler made of the reductions of a program.

        options = topology.compile_options(mesh, phase="prefill")  # of residual.topology(...)
        jitted = jax.jit(jax.shard_map(fn, ...), compiler_options=options)
        schedule.audit(jitted, x, w)                      # or their jax.ShapeDtypeStructs with shardings
        schedule.audit(jitted.lower(x, w).compile())      # the same
        schedule.audit(compiled.as_text())                # the same

    A plain `jax.jit` has none of these options, and without them v5p, for one, hides nothing.
    With arguments on `schedule.make_mesh("v5p:2x2x2", tensor=8)` it is compiled for that hardware, which
    need not be here. Of a function built on `ladder_jax.residual` the reductions that its topology launched are
    judged, and the rest, such as gradients of norm gains, stand in the report's `others`, named; of another function
    every all-reduce and reduce-scatter, whatever its axis. Each window is measured against the program's matmul FLOPs
    divided by their number, or the sublayers' own where they are given (see `judge.read`).
    """
    text = fn_or_compiled if isinstance(fn_or_compiled, str) else _compiled(fn_or_compiled, args).as_text()
    return judge.read(hlo.parse(text), sublayer_flops=sublayer_flops)


def assert_hidden(fn_or_compiled: Any, *args: Any, exposed: int = 1, **settings: Any) -> Report:
    """Raises AssertionError, naming them, if more than `exposed` reductions are not hidden, or any is merged.

    One is: after the last there is nothing left to compute. Arguments as in `audit`; returns its report.
    """
    found = audit(fn_or_compiled, *args, **settings)
    if found.all_reduces == 0:
        raise AssertionError("the program has no reduction to hide")
    if found.exposed > exposed or found.merged:
        named = [
            f"{r.collective.name} ({r.count} x {r.collective.bytes:,} bytes): {r.status.value}"
            for r in found.reductions
            if r.status is not Status.HIDDEN
        ]
        raise AssertionError(
            f"{found.exposed} of {found.all_reduces} reductions are not hidden, {exposed} allowed: " + "; ".join(named)
        )
    return found


def _compiled(program: Any, args: tuple) -> jax.stages.Compiled:
    if isinstance(program, jax.stages.Compiled):
        return program
    with own_names():
        if isinstance(program, jax.stages.Lowered):
            return program.compile()
        if isinstance(program, parallel.Compiled):
            return program.compile(*args)
        jitted = program if hasattr(program, "lower") else jax.jit(program)
        return jitted.lower(*args).compile()
