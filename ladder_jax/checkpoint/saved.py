"""Checkpoints as they lie on the disk: found, verified, read onto any mesh.

A checkpoint is a folder `checkpoints/<step>/`: the items `params` and `optimizer`, plain nested dicts of arrays;
`data`, JSON: the position in the data and what was skipped; `meta`, JSON: this format's name and version, the run's
resolved configuration, the held-out loss; and `manifest.json`. Those that were written before there was a manifest
can be read, but not verified.
"""

import dataclasses
import json
import os
import pathlib
import re
from typing import Any

import jax
import orbax.checkpoint as ocp

from ladder_jax.checkpoint import arrays, manifest
from ladder_jax.config import RunConfig, from_dict
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.errors import UserError
from ladder_jax.nn import ModelDef, Params

FORMAT = "ladder_jax"
VERSION = 1


class Damaged(UserError):
    """A checkpoint that is not what was written. The message names the newest whole one before it."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One saved step: where it lies, and the configuration of the run that wrote it.

    data: the position in the data; time: of writing, in seconds since 1970; validation_loss: held-out, nats a token;
    listed: whether it has a manifest (without one, a changed bit goes unseen); compared: with its contents, already.
    """

    path: pathlib.Path
    step: int
    config: RunConfig
    data: dict[str, Any]
    time: float | None
    validation_loss: float | None
    listed: bool
    compared: bool = False

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The run's own copy of its tokenizer. Raises UserError where it is gone, or has more tokens than the model."""
        folder = self.path.parent.parent / tokenizers.FOLDER
        stored = folder.exists() or self.config.data.tokenizer != tokenizers.BYTES
        found = tokenizers.load(folder if stored else None)
        tokenizers.check_vocabulary(found, vocab_size=self.config.model.vocab_size)
        return found

    def params(self, definition: ModelDef) -> Params:
        """Parameters as `definition` lays them out. Raises Damaged where a file is not what was written."""
        return self._restore("params", definition.abstract)

    def optimizer(self, like: Params) -> Params:
        """The optimizer's dict; `like` gives shapes and shardings. Raises UserError where there never was one."""
        if self.listed and not manifest.lists(self.path, part="optimizer"):
            raise UserError(
                f"checkpoint {str(self.path)!r} was converted, not trained: it has no optimizer's state to go on with"
            )
        return self._restore("optimizer", like)

    @property
    def identity(self) -> str:
        """What tells these parameters from others: a digest of what the manifest lists; without one, the folder."""
        return manifest.digest(self.path, part="params") if self.listed else str(self.path.resolve())

    def check(self) -> "Checkpoint":
        """This, with every file compared with the manifest. Raises Damaged."""
        if self.listed:
            _check_files(self.path, part="")
        return dataclasses.replace(self, compared=self.listed)

    def _restore(self, item: str, like: Any) -> Any:
        self.compare(item, like)
        try:
            # Not strict: the vocabulary's zero padding depends on the mesh. All else was compared.
            place = lambda a: ocp.ArrayRestoreArgs(
                sharding=a.sharding, global_shape=a.shape, dtype=a.dtype, strict=False
            )
            args = ocp.args.PyTreeRestore(like, restore_args=jax.tree.map(place, like))
            return ocp.PyTreeCheckpointHandler().restore(self.path / item, args=args)
        except Exception as error:  # Orbax and tensorstore have no common error for damaged files
            raise damaged(self.path, error) from error

    def compare(self, item: str, like: Any) -> None:
        """Raises Damaged where a file of an item is not what was written, UserError for other arrays than `like`."""
        folder = self.path / item
        if self.listed and not self.compared:
            _check_files(self.path, part=item)
        try:
            if not self.listed:
                arrays.check_readable(folder, set(arrays.shapes(like)))
            arrays.check_shapes(ocp.PyTreeCheckpointHandler().metadata(folder).tree, like, folder=folder)
        except UserError:
            raise
        except Exception as error:
            raise damaged(self.path, error) from error


def steps(folder: pathlib.Path) -> list[int]:
    """The finished checkpoints below `folder`, oldest first. One that is being written does not count."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if _is_step(p.name) and p.is_dir())


def _is_step(name: str) -> bool:
    """As a run writes it: "20", not "020", nor other digits than ASCII's."""
    return name.isascii() and name.isdigit() and name == str(int(name))


def folder_of(path: pathlib.Path) -> pathlib.Path:
    """The folder of the steps' folders: `path`, or `checkpoints` in it where `path` is a run's folder."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def open_checkpoint(path: str | pathlib.Path) -> Checkpoint:
    """The checkpoint at `path`: a run's folder, its `checkpoints/` (the newest of them), or one step's folder.

    Its files are all there; their contents are compared when they are read. Raises UserError where there is none, or
    something else, and Damaged.
    """
    path = pathlib.Path(path).expanduser().absolute()
    if not path.exists():
        raise UserError(f"there is no checkpoint at {str(path)!r}")
    folder = folder_of(path)
    if not folder.is_dir():
        raise UserError(f"{str(path)!r} is a file; a checkpoint is a folder that `ladder-jax train` wrote")
    if found := steps(folder):
        folder = folder / str(found[-1])
    meta = _meta(folder, path)
    listed = "manifest" in meta
    if listed and (wrong := manifest.problems(folder, contents=False)):
        raise _damaged(folder, wrong[0])
    data = _json(folder, "data") if listed else {}
    told = dict(time=meta.get("time"), validation_loss=meta.get("validation_loss"), listed=listed)
    return Checkpoint(folder, meta["step"], from_dict(meta["config"]), data, **told)


def verify(folder: pathlib.Path) -> list[str]:
    """Everything that is wrong with one step's folder, a line a file: reads all of it. Empty: whole, or no manifest."""
    try:
        checkpoint = open_checkpoint(folder)
    except Damaged:
        return manifest.problems(folder) or ["meta/metadata is missing or damaged"]
    return manifest.problems(folder) if checkpoint.listed else []


def reason(error: BaseException) -> str:
    """The first line of the innermost error, which says what is wrong; of one of the system only that."""
    while error.__cause__:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if found := re.search(r"\[os_error_code='(\d+)'\]", str(error)):  # tensorstore's, which has its words anywhere
        return os.strerror(int(found[1]))
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def damaged(folder: pathlib.Path, error: BaseException) -> Damaged:
    """What is said of one step's folder where reading its files raised `error`."""
    return _damaged(folder, reason(error))


def _meta(folder: pathlib.Path, asked: pathlib.Path) -> dict:
    if not (folder / "meta" / "metadata").is_file() and not _is_step(folder.name):
        raise UserError(f"{str(asked)!r} holds no ladder_jax checkpoint")
    meta = _json(folder, "meta")
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(f"{str(folder)!r} is a checkpoint of another program, not of ladder_jax")
    if meta.get("version") != VERSION:
        raise UserError(
            f"checkpoint {str(folder)!r} has format version {meta.get('version')}; this ladder_jax reads {VERSION}"
        )
    if not isinstance(meta.get("step"), int) or not isinstance(meta.get("config"), dict):
        raise _damaged(folder, "its meta has no step, or no config")
    return meta


def _json(folder: pathlib.Path, item: str) -> Any:
    """A JSON item, compared with the manifest where there is one."""
    file = folder / item / "metadata"
    if (folder / manifest.NAME).is_file():
        _check_files(folder, part=item)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _damaged(folder, f"{item}/metadata is missing") from None
    except (OSError, ValueError):
        raise _damaged(folder, f"its {item} is not JSON") from None


def _check_files(folder: pathlib.Path, *, part: str) -> None:
    # On many processes only the first reads everything twice; the others trust the sizes.
    if wrong := manifest.problems(folder, part=part, contents=jax.process_index() == 0):
        raise _damaged(folder, wrong[0])


def _damaged(folder: pathlib.Path, why: str) -> Damaged:
    offer = ""
    for step in steps(folder.parent)[::-1] if _is_step(folder.name) else ():
        before = folder.parent / str(step)
        if step < int(folder.name) and not ((before / manifest.NAME).is_file() and manifest.problems(before)):
            offer = f"; the newest whole one before it is step {step}"
            break
    return Damaged(f"checkpoint {str(folder)!r} is damaged or incomplete: {why}{offer}")
