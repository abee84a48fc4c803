"""Predict from a compiled program's schedule instead of the analytic model (`--from-schedule`).

The target's compiler (see `ladder-jax overlap`) gives the order of operations, their fusion, memory traffic and
merging, and on TPUs their cycles. The machine's constants give the times of collectives and launches, and the share of
the published rates that programs reach. Compiling 80 layers takes minutes, so the model is compiled at two depths and
extrapolated: all layers but the outermost have the same schedule.
"""

import dataclasses

from ladder_jax.config import Phase
from ladder_jax.errors import UserError
from ladder_jax.hardware import HARDWARE, Hardware
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as overlaps
from ladder_jax.predict import result
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.model import Pass, Speed
from ladder_jax.predict.request import BASELINE, Request
from ladder_jax.predict.work import Model
from ladder_jax.schedule import hlo, targets, timeline
from ladder_jax.schedule.collectives import Collective

DEPTHS = (2, 4)
RESIDUALS = "standard,ladder,no-communication"
MACHINES = {"h100": "h100-nvlink", "b200": "b200-nvlink"}  # by target, if their names differ


def with_defaults(options: dict, target: str) -> dict:
    """The options of `request.make` with the target's defaults. Raises UserError if no program can be compiled."""
    parsed = targets.parse(target)
    if parsed.kind not in HARDWARE:
        raise UserError(f"--from-schedule {target}: {parsed.kind} hides nothing: choose a TPU or GPU target")
    if options["implementation"] not in (None, "ours"):
        raise UserError("--from-schedule compiles this library's programs: --implementation must be ours")
    return {
        **options,
        "hardware": options["hardware"] or MACHINES.get(parsed.kind, parsed.kind),
        "tensor": options["tensor"] or parsed.count,
        "residual": options["residual"] or RESIDUALS,
    }


def predict(request: Request, *, target: str) -> result.Result:
    names = dict.fromkeys((*request.residuals, BASELINE))
    speeds = {name: _speed(request, name, target) for name in names}
    return result.of_speeds(request, speeds, fidelity=f"from schedules for {target}")


def _speed(request: Request, residual: str, target: str) -> Speed:
    model = Model(request.config(residual), request.tensor, request.implementation)
    capacity = request.prompt_length + request.new_tokens
    return Speed(
        rows=request.batch,
        new_tokens=request.new_tokens,
        prefill=_pass(request, residual, target, Phase.PREFILL),
        step=_pass(request, residual, target, Phase.DECODE),
        memory=model.memory(rows=request.batch, capacity=capacity),
    )


def _pass(request: Request, residual: str, target: str, phase: Phase) -> Pass:
    layers = request.layers or request.shape.num_layers
    # A hybrid's layers differ, so all of them are compiled.
    depths = DEPTHS if layers > DEPTHS[1] and request.ladder_layers is None else (layers,)
    passes = [_compiled_pass(request, residual, target, phase, depth) for depth in depths]
    if len(passes) == 1:
        return passes[0]
    first, second = passes
    factor = (layers - depths[1]) / (depths[1] - depths[0])
    extrapolate = lambda name: getattr(second, name) + factor * (getattr(second, name) - getattr(first, name))
    exposed = max(0.0, extrapolate("exposed"))
    return Pass(seconds=extrapolate("seconds"), wire=extrapolate("wire"), exposed=exposed)


def _compiled_pass(request: Request, residual: str, target: str, phase: Phase, layers: int) -> Pass:
    program_request = overlaps.make(
        target=target,
        model=request.model,
        residual=residual,
        ladder_layers=request.config(residual).ladder_layers,
        phase=phase,
        layers=layers,
        tensor=request.tensor,
        batch=request.batch,
        prompt_length=request.prompt_length,
        context=request.prompt_length + request.new_tokens if phase is Phase.DECODE else None,
    )
    program = hlo.parse(compiling.compiled(program_request).hlo)
    return play(program, machine=request.machine, kind=program_request.target.kind, ranks=request.tensor)


def play(program: hlo.Program, *, machine: Machine, kind: str, ranks: int) -> Pass:
    """Simulate a scheduled program for a device of `kind`. Its exposed time is the difference to an instant link."""
    hardware = _at_reached_rates(HARDWARE[kind], machine)

    def wire(collective: Collective) -> float:
        seconds = machine.all_reduce(collective.bytes, ranks=ranks)
        return seconds if collective.kind == "all-reduce" else seconds / 2  # a reduce-scatter or an all-gather

    settings = dict(hardware=hardware, ranks=ranks, launch=machine.launch)
    bars = timeline.play(program, wire=wire, contention=machine.contention, **settings)
    instant = timeline.play(program, wire=lambda _: 0.0, **settings)
    end = lambda bars: max((bar.stop for bar in bars), default=0.0)
    return Pass(
        seconds=end(bars),
        wire=sum(bar.stop - bar.start for bar in bars if bar.wire),
        exposed=end(bars) - end(instant),
    )


def _at_reached_rates(hardware: Hardware, machine: Machine) -> Hardware:
    """The hardware with the rates that programs reach, for operations without the compiler's cycles."""
    return dataclasses.replace(
        hardware, flops=machine.flops * machine.flops_share, bandwidth=machine.bandwidth * machine.bandwidth_share
    )
