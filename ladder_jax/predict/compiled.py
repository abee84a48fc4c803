"""Predict from a compiled program's schedule instead of the analytic model (`--from-schedule`).

The target's compiler (see `ladder-jax overlap`) gives the order of operations, their fusion, memory traffic and
merging, and on TPUs their cycles. The machine's constants give the times of collectives and launches, and the share of
the published rates that programs reach. Compiling 80 layers takes minutes, so the model is compiled at two depths and
extrapolated: all layers but the outermost have the same schedule.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable

from ladder_jax.config import Launch, Phase
from ladder_jax.errors import UserError
from ladder_jax.hardware import HARDWARE
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as overlaps
from ladder_jax.predict.machine import FITTED, Algorithm, Machine
from ladder_jax.predict.model import Pass, Speed
from ladder_jax.predict.program import Choice, Opponents, programs
from ladder_jax.predict.request import BASELINE, Request
from ladder_jax.predict.result import Result, of_speeds
from ladder_jax.predict.work import Model
from ladder_jax.schedule import hlo, shards, targets, timeline
from ladder_jax.schedule.collectives import Collective
from ladder_jax.schedule.grouped import Experts

DEPTHS = (2, 4)
RESIDUALS = "standard,ladder,no-communication"


def with_defaults(options: dict, target: str) -> dict:
    """The options of `request.make` with the target's defaults. Raises UserError if no program can be compiled."""
    parsed = targets.parse(target)
    if parsed.kind not in HARDWARE:
        raise UserError(f"--from-schedule {target}: {parsed.kind} hides nothing: choose a TPU or GPU target")
    if options["implementation"] not in (None, "ours"):
        raise UserError("--from-schedule compiles this library's programs: --implementation must be ours")
    return {
        **options,
        "hardware": options["hardware"] or HARDWARE[parsed.kind].machine,
        "tensor": options["tensor"] or parsed.count,
        "residual": options["residual"] or RESIDUALS,
    }


def predict(request: Request, *, target: str) -> Result:
    """Programs as the library compiles them: with the whole stream on every rank."""
    compile_ = functools.cache(functools.partial(_compiled, request, target))
    speed = functools.partial(_speed, request, compile_)
    speeds = {name: speed(name, Opponents.STRONGEST) for name in dict.fromkeys((*request.residuals, BASELINE))}
    nccl = speed(BASELINE, Opponents.NCCL)
    return of_speeds(request, speeds, standard=speeds[BASELINE], nccl=nccl, fidelity=f"from schedules for {target}")


Compile = Callable[[str, Phase, int], tuple[hlo.Program, str]]  # of a residual, a phase and a number of layers


def _speed(request: Request, compile_: Compile, residual: str, opponents: Opponents) -> Speed:
    shard = Model(request.config(residual), request.tensor, request.implementation)
    found = [_pass(request, compile_, shard, phase, opponents) for phase in (Phase.PREFILL, Phase.DECODE)]
    memory = shard.memory(rows=request.batch, capacity=request.prompt_length + request.new_tokens)
    return Speed(request.batch, request.new_tokens, *found, memory=memory)


def _pass(request: Request, compile_: Compile, shard: Model, phase: Phase, opponents: Opponents) -> Pass:
    config = shard.config
    # A hybrid's layers differ, so all of them are compiled; so do first layers without experts.
    alike = request.ladder_layers is None and len(shards.kinds(config)) == 1
    depths = DEPTHS if config.num_layers > DEPTHS[1] and alike else (config.num_layers,)
    # The first program has the whole stream on every rank, and the launch that is compiled.
    block = shard.prefill(rows=request.batch, prompt_length=request.prompt_length)
    program = programs(shard, request.machine, block, phase=phase, choice=Choice(opponents, request.launches))[0]
    experts = None if config.moe is None else Experts(config.moe, shard.ranks)  # at the rates that programs reach
    settings = dict(machine=request.machine, ranks=shard.ranks, among=program.algorithms, experts=experts)
    passes = []
    for depth in depths:
        schedule, kind = compile_(config.residual, phase, depth)
        passes.append(dataclasses.replace(play(schedule, kind=kind, **settings), program=program))
    if len(passes) == 1:
        return passes[0]
    first, second = passes
    factor = (config.num_layers - depths[1]) / (depths[1] - depths[0])
    extrapolate = lambda name: getattr(second, name) + factor * (getattr(second, name) - getattr(first, name))
    times = {name: extrapolate(name) for name in ("seconds", "wire", "exposed")}
    return dataclasses.replace(second, **times | {"exposed": max(0.0, times["exposed"])})


def _compiled(request: Request, target: str, residual: str, phase: Phase, layers: int) -> tuple[hlo.Program, str]:
    """The compiled program's schedule, and the kind of device that it is for."""
    program_request = overlaps.make(
        target=target,
        model=request.model,
        residual=residual,
        ladder_layers=request.config(residual).ladder_layers,
        phase=phase,
        launch=request.launches[0] if len(request.launches) == 1 else Launch.AUTO,
        layers=layers,
        tensor=request.tensor,
        batch=request.batch,
        prompt_length=request.prompt_length,
        context=request.prompt_length + request.new_tokens if phase is Phase.DECODE else None,
    )
    return hlo.parse(compiling.compiled(program_request).hlo), program_request.target.kind


def play(
    program: hlo.Program,
    *,
    machine: Machine,
    kind: str,
    ranks: int,
    among: Iterable[Algorithm] = FITTED,
    experts: Experts | None = None,
) -> Pass:
    """Simulate a scheduled program for a device of `kind`, with the fastest of the all-reduces `among`.

    Its exposed time is the difference to an instant link.
    """
    # Operations without the compiler's cycles run at the rates that programs reach.
    reached = dict(flops=machine.flops * machine.flops_share, bandwidth=machine.bandwidth * machine.bandwidth_share)
    hardware = dataclasses.replace(HARDWARE[kind], **reached)
    used = collections.Counter()

    def wire(collective: Collective) -> float:
        algorithm, seconds = machine.fastest_all_reduce(collective.bytes, ranks=ranks, among=among)
        used[algorithm] += 1
        return seconds if collective.kind == "all-reduce" else seconds / 2  # a reduce-scatter or an all-gather

    settings = dict(hardware=hardware, ranks=ranks, launch=machine.launch, experts=experts)
    bars = timeline.play(program, wire=wire, contention=machine.contention, **settings)
    instant = timeline.play(program, wire=lambda _: 0.0, **settings)
    end, end_instant = (max((bar.stop for bar in one), default=0.0) for one in (bars, instant))
    transfers = sum(bar.stop - bar.start for bar in bars if bar.wire)
    return Pass(end, transfers, end - end_instant, all_reduce=max(used, key=used.get, default=None))
