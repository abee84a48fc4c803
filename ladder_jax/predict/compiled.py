"""The other fidelity: a compiled program's own schedule and estimates, on the machine's link.

The compilers of a target (`ladder-jax overlap`) say in which order operations run, what they fuse, move and merge, and
on TPUs how many cycles each takes; the machine says how long its collectives take, what share of the published rates
programs reach, and what starting an operation costs. Two depths are compiled and the layers between them counted,
because a program of 80 layers takes minutes: all but the outermost are alike.
"""

import dataclasses

from ladder_jax.config import Phase, preset
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
MACHINES = {"h100": "h100-nvlink", "b200": "b200-nvlink"}  # of the targets that are not called as their machine is


def settle(given: dict, target: str) -> dict:
    """The words of `request.make` with a target's defaults. Raises UserError for what no program can be had for."""
    parsed = targets.parse(target)
    if parsed.kind not in HARDWARE:
        raise UserError(f"--from-schedule {target}: {parsed.kind} hides nothing: choose a TPU or GPU target")
    if given["implementation"] not in (None, "ours"):
        raise UserError("--from-schedule compiles this library's programs: --implementation must be ours")
    return {
        **given,
        "hardware": given["hardware"] or MACHINES.get(parsed.kind, parsed.kind),
        "tensor": given["tensor"] or parsed.count,
        "residual": given["residual"] or RESIDUALS,
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
    layers = request.layers or preset(request.model).num_layers
    # A hybrid's layers are not alike, so it is compiled whole.
    depths = DEPTHS if layers > DEPTHS[1] and request.ladder_layers is None else (layers,)
    found = [_played(request, residual, target, phase, depth) for depth in depths]
    if len(found) == 1:
        return found[0]
    first, second = found
    more = (layers - depths[1]) / (depths[1] - depths[0])
    onward = lambda name: getattr(second, name) + more * (getattr(second, name) - getattr(first, name))
    return Pass(seconds=onward("seconds"), wire=onward("wire"), exposed=max(0.0, onward("exposed")))


def _played(request: Request, residual: str, target: str, phase: Phase, layers: int) -> Pass:
    asked = overlaps.make(
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
    program = hlo.parse(compiling.compiled(asked).hlo)
    return play(program, machine=request.machine, kind=asked.target.kind, ranks=request.tensor)


def play(program: hlo.Program, *, machine: Machine, kind: str, ranks: int) -> Pass:
    """A scheduled program for a device of `kind` on the machine. exposed: against a link that takes no time."""
    hardware = _reachable(HARDWARE[kind], machine)

    def wire(collective: Collective) -> float:
        whole = machine.all_reduce(collective.bytes, ranks=ranks)
        return whole if collective.kind == "all-reduce" else whole / 2  # a reduce-scatter, an all-gather: half of one

    settings = dict(hardware=hardware, ranks=ranks, launch=machine.launch)
    bars = timeline.play(program, wire=wire, contention=machine.contention, **settings)
    alone = timeline.play(program, wire=lambda _: 0.0, **settings)
    stop = lambda played: max((bar.stop for bar in played), default=0.0)
    return Pass(
        seconds=stop(bars),
        wire=sum(bar.stop - bar.start for bar in bars if bar.wire),
        exposed=stop(bars) - stop(alone),
    )


def _reachable(hardware: Hardware, machine: Machine) -> Hardware:
    """Where the compiler gives cycles it has its own idea of what is reachable; else the machine's rates count."""
    return dataclasses.replace(
        hardware, flops=machine.flops * machine.flops_share, bandwidth=machine.bandwidth * machine.bandwidth_share
    )
