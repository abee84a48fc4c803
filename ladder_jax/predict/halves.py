"""`interleave=auto`: two halves in turn where they are predicted to be faster on these devices."""

import dataclasses

from ladder_jax.config import (
    DecodeConfig,
    Interleave,
    Launch,
    Phase,
    RunConfig,
)
from ladder_jax.errors import UserError
from ladder_jax.hardware import machine_of
from ladder_jax.nn import ModelDef
from ladder_jax.parallel import resolve_launch, with_ranks
from ladder_jax.predict import machine, model
from ladder_jax.predict.program import Choice, Form, form_of
from ladder_jax.predict.result import WORTH
from ladder_jax.predict.work import Block, Model, Task
from ladder_jax.terminal import Say


def of_training(config: RunConfig, *, kind: str, say: Say) -> RunConfig:
    """`config` with `train.interleave` decided for devices of `kind` (`jax.Device.device_kind`)."""
    train = config.train
    mesh = config.mesh
    shard = Model(with_ranks(config.model, tensor=mesh.tensor), mesh.tensor, trains=True)
    rows = train.batch // (mesh.data * mesh.fsdp) // train.accumulate
    interleave, why = _fastest(
        shard,
        shard.prefill(rows=rows, prompt_length=train.sequence),
        form_of(mesh.experts, sequence_parallel=train.sequence_parallel),
        phase=Phase.TRAIN,
        kind=kind,
        choice=Choice(experts=mesh.experts),
    )
    decided = lambda choice: dataclasses.replace(
        config, train=dataclasses.replace(train, interleave=choice)
    )
    try:
        found = decided(interleave)
    except UserError as error:  # the settings allow none
        interleave, why = Interleave.WHOLE, f"as {error}"
        found = decided(interleave)
    say(f"train.interleave=auto: {interleave.value}, {why}")
    return found


def of_reading(
    settings: DecodeConfig, *, definition: ModelDef, tokens: int, say: Say
) -> DecodeConfig:
    """`settings` with `decode.interleave` decided for prompts of `tokens` tokens, which are read
    one at a time.
    """
    layout = definition.layout
    shard = Model(definition.config, 1 if layout.emulated else layout.ranks)
    launch = settings.launch
    if launch is Launch.AUTO:
        launch = resolve_launch(launch, mesh=layout.mesh)
    interleave, why = _fastest(
        shard,
        shard.prefill(rows=1, prompt_length=min(tokens, settings.prefill_chunk)),
        Form.ALL_REDUCE,
        phase=Phase.PREFILL,
        kind=layout.mesh.devices.flat[0].device_kind,
        choice=Choice(launch=launch),
    )
    say(f"decode.interleave=auto: {interleave.value}, {why}")
    return dataclasses.replace(settings, interleave=interleave)


def _fastest(
    shard: Model, block: Block, form: Form, *, phase: Phase, kind: str, choice: Choice
) -> tuple[Interleave, str]:
    """Halves where they are predicted to be faster in this form, by what is worth it; and why."""
    name = machine_of(kind)
    if shard.ranks == 1:
        return Interleave.WHOLE, "as one tensor rank communicates nothing"
    if name is None:
        return Interleave.WHOLE, f"as nothing is predicted for {kind}"
    task = Task(shard, machine.load(name), block)
    seconds = {}
    for one in model.passes(task, phase=phase, by=choice):
        if one.program.form is form:
            fastest = seconds.get(one.interleave, one.seconds)
            seconds[one.interleave] = min(fastest, one.seconds)
    if 2 not in seconds:
        return Interleave.WHOLE, "as this model has no halves"
    gain = seconds[1] / seconds[2]
    interleave = Interleave.HALVES if gain >= WORTH else Interleave.WHOLE
    return interleave, f"predicted to be {gain:.2f} x as fast in halves on {name}"
