"""Audit a compiled function, yours or the library's, and an assertion for test suites."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ladder_jax.errors import UserError, described
from ladder_jax.schedule import hlo, judge
from ladder_jax.schedule.report import Report, Status

NAMES_IN_KEY = "jax_compilation_cache_include_metadata_in_key"


def audit(
    fn_or_compiled: Any, *args: Any, sublayer_flops: Mapping[str, float] | None = None
) -> Report:
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
    mesh axis. The window of a reduction is measured in sublayers: by `sublayer_flops`, or by
    default by the program's matmul FLOPs over the number of its reductions (see `judge.read`).
    """
    if not isinstance(
        fn_or_compiled, str | jax.stages.Compiled | jax.stages.Lowered
    ) and not callable(fn_or_compiled):
        raise UserError(
            f"audit takes a function, a compiled one, or its text, not {described(fn_or_compiled)}"
        )
    text = (
        fn_or_compiled
        if isinstance(fn_or_compiled, str)
        else _compiled(fn_or_compiled, args).as_text()
    )
    return judge.read(hlo.parse(text), sublayer_flops=sublayer_flops)


def assert_hidden(fn_or_compiled: Any, *args: Any, exposed: int = 1, **settings: Any) -> Report:
    """Raise AssertionError, naming the reductions, if more than `exposed` are not hidden, if any is
    merged, or if the program has a collective in an unknown form.

    The default is 1, because no compute follows a program's last reduction. Arguments and result
    are those of `audit`.
    """
    report = audit(fn_or_compiled, *args, **settings)
    if report.unknown:
        raise AssertionError(f"not counted, as their form is unknown: {', '.join(report.unknown)}")
    if report.all_reduces == 0:
        raise AssertionError("the program has no reduction to hide")
    if report.exposed > exposed or report.merged:
        not_hidden = [
            f"{r.collective.name} ({r.count} x {r.collective.bytes:,} bytes): {r.status.value}"
            for r in report.reductions
            if r.status is not Status.HIDDEN
        ]
        raise AssertionError(
            f"{report.exposed} of {report.all_reduces} reductions are not hidden, {exposed} allowed: "
            + "; ".join(not_hidden)
        )
    return report


def _compiled(program: Any, args: tuple) -> jax.stages.Compiled:
    if isinstance(program, jax.stages.Compiled):
        return program
    with _names_in_cache_key():
        if hasattr(program, "compile"):  # lowered, or a `parallel.Compiled`
            return program.compile(*args)
        jitted = program if hasattr(program, "lower") else jax.jit(program)
        return jitted.lower(*args).compile()


@contextlib.contextmanager
def _names_in_cache_key() -> Iterator[None]:
    """Within this context, jax's persistent cache distinguishes programs by their named scopes too.

    By default its keys leave names out: a lookup may return a program of the same operations in
    other named scopes.
    """
    previous = getattr(jax.config, NAMES_IN_KEY)
    jax.config.update(NAMES_IN_KEY, True)
    try:
        yield
    finally:
        jax.config.update(NAMES_IN_KEY, previous)
