"""Saved checkpoints: open them, verify them, and read them onto any mesh.

A checkpoint is a folder `checkpoints/<step>/` with these items: `params` and `optimizer`, nested
dicts of arrays; `data`, JSON with the position in the data, the name of its tokenizer and the
skipped batches; `meta`, JSON with this format's name and version, the run's resolved configuration
and the held-out loss; and `manifest.json`. Older checkpoints without a manifest can be read, but
not verified.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from ladder_jax.checkpoint import arrays, manifest
from ladder_jax.checkpoint.arrays import Abstract, Key, named, shapes_of, stored
from ladder_jax.config import Json, RunConfig, from_dict, to_dict
from ladder_jax.config.fields import shown
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.errors import UserError
from ladder_jax.files import AnyPath, absolute, expanded, explained, read_text, reason
from ladder_jax.nn import ModelDef, Params

FORMAT = "ladder_jax"
VERSION = 1


type Texts = Mapping[str, Any]
"""JSON values, by the names of a checkpoint's items without arrays."""


def texts(
    config: RunConfig,
    *,
    step: int,
    data: Mapping[str, Any] = MappingProxyType({}),
    validation_loss: float | None = None,
) -> Texts:
    """The items `data` and `meta` of a checkpoint that is written now."""
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "manifest": manifest.NAME,
        "step": step,
        "time": time.time(),
        "validation_loss": None if validation_loss is None else float(validation_loss),
        "config": to_dict(config),
    }
    return {"data": {"step": step, **data}, "meta": meta}


def publish(folder: AnyPath, texts: Texts) -> None:
    """Writes these, and the manifest, which makes a checkpoint of the folder."""
    for item, value in texts.items():
        (folder / item).mkdir(exist_ok=True)
        (folder / item / "metadata").write_text(json.dumps(value))
    manifest.write(folder)


class Damaged(UserError):
    """A file of the checkpoint is missing or changed."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One saved step: its folder, and the configuration of the run that wrote it.

    data: the position in the data. time: when it was written, in seconds since 1970.
    validation_loss: the held-out loss, in nats per token; None if it was not measured.
    has_manifest: without a manifest, a changed bit is not detected.
    verified: whether all files have been compared with the manifest.
    """

    path: AnyPath
    step: int
    config: RunConfig
    data: Json
    time: float | None
    validation_loss: float | None
    has_manifest: bool
    verified: bool = False

    __repr__ = shown

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The run's copy of its tokenizer. Raises UserError if it is missing, or has more tokens
        than the model.
        """
        tokenizer = tokenizers.load(None if self.is_bytes else self._tokenizers)
        tokenizers.check_vocabulary(tokenizer, vocab_size=self.config.model.vocab_size)
        return tokenizer

    @property
    def is_bytes(self) -> bool:
        """Whether the run's tokens are bytes."""
        # older checkpoints do not name it
        name = self.data.get("tokenizer", self.config.data.tokenizer)
        return name == tokenizers.BYTES and not self._tokenizers.exists()

    @property
    def _tokenizers(self) -> AnyPath:
        return self.path.parent.parent / tokenizers.FOLDER

    def params(self, definition: ModelDef) -> Params:
        """The parameters, with the shapes and shardings of `definition`. Raises Damaged if a file
        was changed.
        """
        return self._restore("params", definition.abstract)

    def optimizer(self, like: Params) -> Params:
        """The optimizer's state, with the shapes and shardings of `like`. Raises UserError if none
        was saved.
        """
        if not (self.path / "optimizer").is_dir():
            raise UserError(
                f"checkpoint {str(self.path)!r} was converted, not trained: it has no optimizer's state to go on with"
            )
        return self._restore("optimizer", like)

    @property
    def identity(self) -> str:
        """A string that identifies the parameters: their digest in the manifest; without a
        manifest, the path.
        """
        if self.has_manifest:
            return manifest.digest(self.path, part="params")
        return str(self.path.resolve())

    def check(self) -> "Checkpoint":
        """Compares every file with the manifest, and returns this checkpoint as verified. Raises
        Damaged.
        """
        if self.has_manifest:
            check_files(self.path, "")
        return dataclasses.replace(self, verified=self.has_manifest)

    def _restore(self, item: str, like: Params) -> Params:
        for name, leaf in named(like).items():
            if getattr(leaf, "sharding", None) is None:
                raise UserError(
                    f"{name} has no sharding to be read with: give jax's arrays, or ShapeDtypeStructs that have one"
                )
        self.compare(item, like)
        with _reading(self.path):
            restored = arrays.read(self.path / item, named(like))
            return jax.tree.unflatten(jax.tree.structure(like), restored)

    def compare(self, item: str, like: Params) -> Abstract:
        """The stored arrays of `item`, which have the names and shapes of `like`'s.

        Raises Damaged if a file was changed, UserError if they have others.
        """
        if self.has_manifest and not self.verified:
            check_files(self.path, f"{item}/")
        folder = self.path / item
        with _reading(self.path):
            there = stored(folder)
        check_shapes(there, like, folder=folder)
        return there


@dataclasses.dataclass(frozen=True)
class Pieces:
    """`Pieces(checkpoint, definition)(keys)` yields each key's array, sharded as in `definition`,
    without dimension L.

    Inference loads weights this way; arrays keep the stored dtype. Before the first array, the
    checkpoint's files are compared with the manifest. Raises Damaged if a file was changed,
    UserError if an array has another shape.
    """

    checkpoint: Checkpoint
    definition: ModelDef

    def __call__(self, keys: Sequence[Key]) -> Iterator[jax.Array]:
        checkpoint = self.checkpoint
        there = checkpoint.compare("params", self.definition.abstract)
        pieces = self.definition.pieces
        like = {name: pieces[name].update(dtype=there[name].dtype) for name, _ in keys}
        with _reading(checkpoint.path):
            yield from arrays.read(checkpoint.path / "params", like, keys)


@contextlib.contextmanager
def _reading(folder: AnyPath) -> Iterator[None]:
    """Turns errors into Damaged, as tensorstore has none of its own for damaged files. A device or a
    host that is out of memory is no damage.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise MemoryError(str(error)) from error
        raise damaged(folder, error) from error


def check_shapes(stored: Any, like: Any, *, folder: AnyPath) -> None:
    """Raises UserError if an array is missing, extra or of another shape but for padding
    (vocabulary, experts).
    """
    actual = shapes_of(stored)
    expected = shapes_of(like)
    for name in sorted(actual.keys() | expected.keys()):
        shape = actual.get(name)
        wanted = expected.get(name)
        if None in (shape, wanted) or _unpadded(name, shape) != _unpadded(name, wanted):
            raise UserError(
                f"checkpoint {str(folder)!r} does not fit its configuration: {name} is {shape}, not {wanted}"
            )


def _unpadded(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without the dimension whose padding depends on the mesh."""
    if name.endswith("table"):
        return shape[1:]
    if "mlp/experts/" in name:
        return shape[:1] + shape[2:]
    return shape


def steps(folder: str | AnyPath) -> list[int]:
    """The steps of the finished checkpoints in `folder`, in order."""
    folder = expanded(folder)
    return [step for step in _all_steps(folder) if _is_finished(folder / str(step))]


def unfinished_steps(folder: AnyPath) -> list[int]:
    """The steps whose checkpoints have no manifest, and were not put aside as damaged."""
    finished = steps(folder)
    aside = lambda step: (folder / str(step) / manifest.DAMAGED).exists()
    return [step for step in _all_steps(folder) if step not in finished and not aside(step)]


def _all_steps(folder: AnyPath) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if _is_step(path.name))


def _is_finished(step: AnyPath) -> bool:
    """Whether its manifest, which is written last, is there, or it is of before there were any."""
    if (step / manifest.NAME).exists():
        return True
    try:
        meta = json.loads(read_text(step / "meta" / "metadata"))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return False
    return isinstance(meta, dict) and "manifest" not in meta


def _is_step(name: str) -> bool:
    """Whether `name` is a step as a run writes it: "20", but not "020" or digits other than
    ASCII's.
    """
    return name.isascii() and name.isdigit() and name == str(int(name))


def folder_of(path: AnyPath) -> AnyPath:
    """The folder that holds the steps' folders: `path/checkpoints` if `path` is a run's folder,
    else `path`.
    """
    inside = path / "checkpoints"
    if inside.is_dir():
        return inside
    return path


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """Open the checkpoint at `path`: one step's folder, or the newest in a run's folder or its
    `checkpoints/`.

    Checks that all files exist and have the right sizes. Their contents are compared when they are
    read. Raises UserError if `path` holds no checkpoint of this program, and Damaged.
    """
    path = absolute(path)
    with explained(path, "read"):
        if not path.exists():
            raise UserError(f"there is no checkpoint at {str(path)!r}")
        folder = folder_of(path)
        if not folder.is_dir():
            raise UserError(
                f"{str(path)!r} is a file; a checkpoint is a folder that `ladder-jax train` wrote"
            )
        if finished := steps(folder):
            folder = folder / str(finished[-1])
        found = (folder / "meta" / "metadata").is_file()
        if not found and _is_step(folder.name):  # damaged, if it holds another part
            found = any((folder / name).exists() for name in ("meta", "params", manifest.NAME))
        if not found:
            raise UserError(
                f"{str(path)!r} holds no ladder_jax checkpoint, and no config.json of another model"
            )
        has_manifest = (folder / manifest.NAME).is_file()
        if has_manifest:
            _compare(folder, "meta/", "data/")  # by all, as this may be before they have joined
        meta = _meta(folder)
        if "manifest" in meta and not has_manifest:
            raise damaged(folder, f"{manifest.NAME} is missing")
        data = _json(folder, "data") if has_manifest else {}
    return Checkpoint(
        folder,
        meta["step"],
        from_dict(meta["config"]),
        data,
        time=meta.get("time"),
        validation_loss=meta.get("validation_loss"),
        has_manifest=has_manifest,
    )


def verify(folder: str | AnyPath) -> list[str]:
    """Reads all files of one step's folder, or of a run's newest; one line for each damaged file.
    Empty if intact, or without manifest.
    """
    folder = folder_of(expanded(folder))
    if finished := steps(folder):
        folder = folder / str(finished[-1])
    try:
        checkpoint = open_checkpoint(folder)
    except Damaged:
        return manifest.problems(folder) or ["meta/metadata is missing or damaged"]
    return manifest.problems(folder) if checkpoint.has_manifest else []


def _meta(folder: AnyPath) -> dict:
    """The item `meta`, checked."""
    meta = _json(folder, "meta")
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(f"{str(folder)!r} is a checkpoint of another program, not of ladder_jax")
    if meta.get("version") != VERSION:
        raise UserError(
            f"checkpoint {str(folder)!r} has format version {meta.get('version')}; this ladder_jax reads {VERSION}"
        )
    if not isinstance(meta.get("step"), int) or not isinstance(meta.get("config"), dict):
        raise damaged(folder, "its meta has no step, or no config")
    return meta


def _json(folder: AnyPath, item: str) -> Any:
    try:
        return json.loads(read_text(folder / item / "metadata"))
    except FileNotFoundError:
        raise damaged(folder, f"{item}/metadata is missing") from None
    except OSError as error:
        raise damaged(folder, f"{item}/metadata cannot be read: {reason(error)}") from None
    except (ValueError, RecursionError):
        raise damaged(folder, f"its {item} is not JSON") from None


def check_files(folder: AnyPath, *contents: str) -> None:
    """Raises Damaged where a file is not what the manifest says.

    contents: as `manifest.problems` has it. One process compares them, as it reads every file once
        more; the others compare sizes.
    """
    _compare(folder, *(contents if jax.process_index() == 0 else ()))


def _compare(folder, *contents):
    if problems := manifest.problems(folder, contents=contents):
        raise damaged(folder, problems[0])


def damaged(folder: AnyPath, problem: str | BaseException) -> Damaged:
    """The error to raise where one step's folder has this problem, or reading it raised this
    error.
    """
    told = problem if isinstance(problem, str) else reason(problem)
    return Damaged(f"checkpoint {str(folder)!r} is damaged or incomplete: {told}")
