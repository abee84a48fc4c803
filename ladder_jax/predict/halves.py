"""`interleave=auto`: two halves in turn where they are predicted to be faster on these devices."""

import dataclasses
from collections.abc import Callable

from ladder_jax.config import DecodeConfig, Interleave, Phase, RunConfig
from ladder_jax.errors import UserError
from ladder_jax.nn import ModelDef
from ladder_jax.parallel import with_ranks
from ladder_jax.predict import machine, model, training, work
from ladder_jax.predict.advice import WORTH
from ladder_jax.predict.implementation import OURS
from ladder_jax.predict.model import Pass
from ladder_jax.predict.program import Form, Opponents
from ladder_jax.predict.work import Model
from ladder_jax.train.out_of_memory import KINDS as TPUS

MACHINES = TPUS | {  # by the beginning of a `jax.Device.device_kind`, the longer first
    "NVIDIA H100 PCIe": "h100-no-nvlink",
    "NVIDIA H100": "h100-nvlink",
    "NVIDIA H200": "h200-nvlink",
    "NVIDIA B200": "b200-nvlink",
    "NVIDIA B300": "b300-nvlink",
    "NVIDIA L40S": "l40s-no-peer",
    "NVIDIA A800": "a800-pcie",
}


def of_training(config: RunConfig, *, kind: str, say: Callable[[str], None]) -> RunConfig:
    """`config` with `train.interleave` decided for devices of `kind` (`jax.Device.device_kind`)."""
    train, mesh = config.train, config.mesh
    if train.interleave is not Interleave.AUTO:
        return config
    decided = lambda choice: dataclasses.replace(config, train=dataclasses.replace(train, interleave=choice))
    try:
        halves = decided(Interleave.HALVES)
    except UserError as error:  # the settings allow none
        say(f"train.interleave=auto: 1, as {error}")
        return decided(Interleave.WHOLE)
    rows = train.batch // (mesh.data * mesh.fsdp) // train.accumulate
    form = Form.SEQUENCE_PARALLEL if train.sequence_parallel else Form.ALL_REDUCE

    def passes(name: str) -> list[Pass]:
        shape = dict(tensor=mesh.tensor, rows=rows, sequence=train.sequence)
        return training.passes(with_ranks(config.model, tensor=mesh.tensor), machine=machine.load(name), **shape)

    faster, why = _faster(passes, form, kind=kind, tensor=mesh.tensor)
    say(f"train.interleave=auto: {2 if faster else 1}, {why}")
    return halves if faster else decided(Interleave.WHOLE)


def of_reading(
    settings: DecodeConfig, *, definition: ModelDef, tokens: int, say: Callable[[str], None]
) -> DecodeConfig:
    """`settings` with `decode.interleave` decided for prompts of `tokens` tokens, which are read one at a time."""
    if settings.interleave is not Interleave.AUTO:
        return settings
    layout, config, block = definition.layout, definition.config, min(tokens, settings.prefill_chunk)
    tensor = 1 if layout.emulated else layout.ranks

    def passes(name: str) -> list[Pass]:
        shape = dict(rows=1, prompt_length=block, new_tokens=0, implementation=OURS)
        among = dict(machine=machine.load(name), phase=Phase.PREFILL, opponents=Opponents.STRONGEST)
        return model.passes(Model(config, tensor, OURS), work.prefill(**shape), **among)

    faster, why = _faster(passes, Form.ALL_REDUCE, kind=layout.mesh.devices.flat[0].device_kind, tensor=tensor)
    say(f"decode.interleave=auto: {2 if faster else 1}, {why}")
    return dataclasses.replace(settings, interleave=Interleave.HALVES if faster else Interleave.WHOLE)


def _faster(passes: Callable[[str], list[Pass]], form: Form, *, kind: str, tensor: int) -> tuple[bool, str]:
    """Whether two halves are predicted to be faster than the whole batch in this form, by what is worth it; and why."""
    if tensor == 1:
        return False, "as one tensor rank communicates nothing"
    name = next((name for beginning, name in MACHINES.items() if kind.startswith(beginning)), None)
    if name is None:
        return False, f"as nothing is predicted for {kind}"
    seconds = {1: [], 2: []}
    for one in passes(name):
        if one.program.form is form:
            seconds[one.program.interleave].append(one.seconds)
    if not seconds[2]:
        return False, "as this model has no halves"
    gain = min(seconds[1]) / min(seconds[2])
    return gain >= WORTH, f"predicted to be {gain:.2f} x as fast in halves on {name}"
