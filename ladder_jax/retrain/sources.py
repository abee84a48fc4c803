"""The checkpoints that a run takes weights from: where it starts, and its teacher. Noted, so that it goes on alike."""

import dataclasses
import hashlib
import pathlib
from typing import Any

from ladder_jax.checkpoint import Checkpoint, open_checkpoint
from ladder_jax.config import START, ModelConfig, RunConfig, to_dict
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.errors import UserError

FUNCTION = ("residual", "ladder_layers", "ranks", "dtype", "residual_dtype")
"""What two models that have the same parameters may differ in."""


@dataclasses.dataclass(frozen=True)
class Sources:
    """start: what training begins with; teacher: whose predictions it learns. None where there is none."""

    start: Checkpoint | None = None
    teacher: Checkpoint | None = None

    def noted(self) -> dict[str, Any]:
        """For a checkpoint's `data`: which they were."""
        found = {"start": self.start, "teacher": self.teacher}
        return {name: {"path": str(c.path), "digest": _digest(c)} for name, c in found.items() if c}


def of_run(config: RunConfig, *, noted: dict[str, Any] | None = None, told: dict[str, Any] | None = None) -> Sources:
    """Those that `config` names; of a run that goes on (`noted` in its checkpoint) only what it still needs.

    told: another process's `Sources.noted()`. A folder's newest checkpoint may be another one here.

    Raises UserError for what is not there, has another shape, or is not what it was.
    """
    teacher = config.distill.teacher
    needs_start = noted is None or config.lora.rank or teacher == START
    noted = (told or {}) | (noted or {})
    start = _opened("train.start", config.train.start, config, noted.get("start")) if needs_start else None
    other = None if teacher in (None, START) else _opened("distill.teacher", teacher, config, noted.get("teacher"))
    return Sources(start, start if teacher == START else other)


def teacher_model(config: RunConfig, sources: Sources) -> ModelConfig | None:
    """The teacher's model: its checkpoint's, with the topology that distill.residual names."""
    if sources.teacher is None:
        return None
    dtypes = dict(dtype=config.model.dtype, residual_dtype=config.model.residual_dtype)
    model = dataclasses.replace(sources.teacher.config.model, **dtypes)
    if config.distill.residual is None:
        return model
    return dataclasses.replace(model, residual=config.distill.residual, ladder_layers=None, ranks=None)


def tokenizer(config: RunConfig, *, folder: pathlib.Path) -> tokenizers.Tokenizer | None:
    """The one that a run which starts from a checkpoint has: its own copy, or that checkpoint's. None for any other."""
    if config.train.start is None:
        return None
    if (folder / tokenizers.FOLDER).is_dir():
        return tokenizers.load(folder / tokenizers.FOLDER)
    if (folder / "config.json").is_file():
        return tokenizers.load(None)
    return _open("train.start", config.train.start).tokenizer()


def check_shape(name: str, theirs: ModelConfig, ours: ModelConfig) -> None:
    """Refuse a checkpoint whose model has other parameters than `ours`, by the first field that differs."""
    before, after = to_dict(theirs), to_dict(ours)
    for field in before:
        if field not in FUNCTION and before[field] != after[field]:
            raise UserError(
                f"{name}: the checkpoint has model.{field}={before[field]}, and this run model.{field}={after[field]}"
            )
    shared = "parallel-shared-norm"
    if (theirs.residual == shared) != (ours.residual == shared):
        raise UserError(
            f"{name}: the checkpoint has model.residual={theirs.residual}, and this run {ours.residual}:"
            f" a layer of {shared} has one norm, of the others two"
        )


def _opened(name: str, path: str | None, config: RunConfig, noted: dict | None) -> Checkpoint | None:
    if path is None:
        return None
    checkpoint = _open(name, noted["path"] if noted else path)
    if noted and _digest(checkpoint) != noted["digest"]:
        raise UserError(f"{name}: {str(checkpoint.path)!r} is not the checkpoint any more that this run began with")
    check_shape(f"{name}={path!r}", checkpoint.config.model, config.model)
    return checkpoint


def _open(name: str, path: str) -> Checkpoint:
    try:
        return open_checkpoint(path)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _digest(checkpoint: Checkpoint) -> str:
    """Of the manifest, which has a digest of every file; older checkpoints have their time alone."""
    file = checkpoint.path / "manifest.json"
    content = file.read_bytes() if checkpoint.listed else str(checkpoint.time).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
