"""The models that a run takes weights from: where it starts, and its teacher."""

import dataclasses
import hashlib
import pathlib
from typing import Any

from flax import traverse_util

from ladder_jax import residual
from ladder_jax.checkpoint import Checkpoint
from ladder_jax.config import START, Json, ModelConfig, RunConfig, to_dict
from ladder_jax.config.fields import check
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError
from ladder_jax.pretrained import OpenedModel, open_model

FUNCTION = ("residual", "ladder_layers", "ranks", "side", "dtype", "residual_dtype", "moe.capacity")
"""The fields in which two models with the same parameters may differ."""


@dataclasses.dataclass(frozen=True)
class Sources:
    """start: the model that training begins with; teacher: the one that it learns from."""

    start: OpenedModel | None = None
    teacher: OpenedModel | None = None

    def record(self) -> Json:
        """Path and digest of each, for the item `data` of a run's checkpoints."""
        return {
            name: {"path": exact_name(model), "digest": _digest(model)}
            for name, model in vars(self).items()
            if model
        }


def of_run(
    config: RunConfig,
    *,
    recorded: Json | None = None,
    decided: Json | None = None,
    tokenizer: Tokenizer | None = None,
) -> Sources:
    """The models that `config` names; of a run that is resumed only those that it still needs.

    recorded: `Sources.record()` in the run's own checkpoint; None for a new run.
    decided: another process's `Sources.record()`, which says which checkpoint of a folder is meant.
    tokenizer: of the data; the teacher's must be alike, if it has one.

    Raises UserError for a model that is missing, has another shape, or has changed since the run
    began.
    """
    teacher = config.distill.teacher
    needs_start = recorded is None or config.lora.rank or teacher == START
    recorded = (decided or {}) | (recorded or {})
    start = None
    if needs_start:
        start = _opened("train.start", config.train.start, config, recorded.get("start"))
    learnt = start
    if teacher != START:
        learnt = _opened("distill.teacher", teacher, config, recorded.get("teacher"))
    found = Sources(start, learnt)
    _check_refitted(config, found)
    if tokenizer and learnt is not start and learnt and learnt.has_tokenizer:
        check(
            tokenizers.alike(learnt.tokenizer(), tokenizer),
            f"distill.teacher={teacher!r} has another tokenizer than the data ({tokenizer.name}): it would predict"
            " other texts' tokens",
        )
    return found


def teacher_model(config: RunConfig, sources: Sources) -> ModelConfig | None:
    """The teacher's model: its checkpoint's, with the topology of distill.residual."""
    if sources.teacher is None:
        return None
    model = dataclasses.replace(
        sources.teacher.config.model,
        dtype=config.model.dtype,
        residual_dtype=config.model.residual_dtype,
        side=None,
    )
    if config.distill.residual is None:
        return model
    return dataclasses.replace(
        model, residual=config.distill.residual, ladder_layers=None, ranks=None
    )


def tokenizer(config: RunConfig, *, folder: pathlib.Path) -> Tokenizer:
    """With train.start: the run's, once its configuration is written, until then that
    checkpoint's.
    """
    if (folder / "config.json").is_file():
        saved = folder / tokenizers.FOLDER
        return tokenizers.load(saved if saved.is_dir() else None)
    return _open("train.start", config.train.start).tokenizer()


def check_shape(name: str, theirs: ModelConfig, ours: ModelConfig) -> None:
    """Raises UserError, naming the first field that differs, for a checkpoint whose model has other
    parameters.
    """
    before = _shape(theirs)
    after = _shape(ours)
    for field in before | after:
        has = before.get(field)
        wants = after.get(field)
        check(
            has == wants,
            f"{name}: the checkpoint has model.{field}={has}, and this run model.{field}={wants}",
        )
    allowed = None if name.startswith("distill") else ours.side
    check(
        theirs.side in (None, allowed),
        f"{name}: the checkpoint has a side network, {theirs.side}, where {allowed} can be",
    )
    shared = "parallel-shared-norm"
    check(
        (theirs.residual == shared) == (ours.residual == shared),
        f"{name}: the checkpoint has model.residual={theirs.residual}, and this run {ours.residual}:"
        f" a layer of {shared} has one norm, of the others two",
    )


def _shape(model: ModelConfig) -> dict[str, Any]:
    """The fields that are alike in models with the same parameters, by dotted name."""
    fields = traverse_util.flatten_dict(to_dict(dataclasses.replace(model, side=None)), sep=".")
    return {name: value for name, value in fields.items() if name not in FUNCTION}


def _check_refitted(config: RunConfig, sources: Sources) -> None:
    """Raises UserError where weights that `convert` refitted would be used in another topology than
    their own.
    """
    start = sources.start
    teacher = sources.teacher
    if start and start.refit and config.conversion.steps:
        raise UserError(
            f"conversion.steps={config.conversion.steps}: the weights of {start.name!r} were refitted, and it begins"
            " with a standard model; start from the model that was converted (train.start=PATH), or leave it out"
            " (conversion.steps=0)"
        )
    if teacher is None or not teacher.refit:
        return
    own = teacher.config.model
    wanted = teacher_model(config, sources)
    if residual.of_model(own) != residual.of_model(wanted):
        raise UserError(
            f"distill.teacher: the weights of {teacher.name!r} were refitted for {own.residual}, so they cannot teach"
            f" as {wanted.residual}; name the model that was converted (distill.teacher=PATH)"
        )


def _opened(
    name: str, path: str | None, config: RunConfig, recorded: dict | None
) -> OpenedModel | None:
    if path is None:
        return None
    model = _open(name, recorded["path"] if recorded else path)
    if recorded and _digest(model) != recorded["digest"]:
        raise UserError(
            f"{name}: {exact_name(model)!r} is not the checkpoint any more that this run began with"
        )
    check_shape(f"{name}={path!r}", model.config.model, config.model)
    return model


def _open(name: str, path: str) -> OpenedModel:
    try:
        return open_model(path)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def exact_name(model: OpenedModel) -> str:
    """The name that opens the same weights again: of a run's folder the step's, of the Hub the
    commit's.
    """
    if isinstance(model.weights, Checkpoint):
        return str(model.weights.path)
    return model.name if model.on_hub else str(model.path.absolute())


def _digest(model: OpenedModel) -> str:
    """Of a manifest, which lists every file's digest; of an older checkpoint without one, of its
    time of writing.
    """
    checkpoint = model.weights
    if not isinstance(checkpoint, Checkpoint):
        return model.identity
    file = checkpoint.path / "manifest.json"
    content = file.read_bytes() if checkpoint.has_manifest else str(checkpoint.time).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
