"""Checkpoints: plain nested dicts of arrays on Orbax, written atomically, read onto any mesh.

A checkpoint is a folder `checkpoints/<step>/` of two items, `params` and `optimizer`, and `meta`,
a JSON object with this format's name and version and the run's resolved configuration.
"""

import dataclasses
import itertools
import json
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore

from ladder_jax.config import RunConfig, from_dict, to_dict
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.errors import UserError
from ladder_jax.nn import Definition, Params

FORMAT = "ladder_jax"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One saved step: where it lies, and the configuration of the run that wrote it.

    data: the fingerprint of what it was trained on; with the step it says where the data stands.
    """

    path: pathlib.Path
    step: int
    config: RunConfig
    data: str | None = None

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The run's own copy of its tokenizer. Raises UserError where it is gone, or has more tokens than the model."""
        folder = self.path.parent.parent / tokenizers.FOLDER
        stored = folder.exists() or self.config.data.tokenizer != tokenizers.BYTES
        found = tokenizers.load(folder if stored else None)
        tokenizers.check_vocabulary(found, vocab_size=self.config.model.vocab_size)
        return found

    def params(self, definition: Definition) -> Params:
        """Parameters as `definition` lays them out. Raises UserError for a damaged checkpoint."""
        return self._restore("params", definition.abstract)

    def optimizer(self, like: Params) -> Params:
        """The optimizer's dict; `like` gives shapes and shardings."""
        return self._restore("optimizer", like)

    def _restore(self, item: str, like: Any) -> Any:
        try:
            handler, folder = ocp.PyTreeCheckpointHandler(), self.path / item
            _check_readable(folder, like)
            _check_shapes(handler.metadata(folder).tree, like, folder)
            # Not strict: the vocabulary's zero padding depends on the mesh. All else was compared.
            place = lambda a: ocp.ArrayRestoreArgs(
                sharding=a.sharding, global_shape=a.shape, dtype=a.dtype, strict=False
            )
            args = ocp.args.PyTreeRestore(like, restore_args=jax.tree.map(place, like))
            return handler.restore(folder, args=args)
        except UserError:
            raise
        except Exception as error:  # Orbax and tensorstore have no common error for damaged files
            raise UserError(f"checkpoint {str(self.path)!r} is damaged or incomplete: {_first_line(error)}") from error


class Store:
    """Writes a run's checkpoints in the background, and keeps the newest few."""

    def __init__(self, folder: pathlib.Path, *, config: RunConfig, data: str | None = None):
        self._config, self._data = config, data
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.train.keep_checkpoints, create=True, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, step: int, *, params: Params, optimizer: Params) -> None:
        """Start to write; an error of the save before shows here."""
        meta = {"format": FORMAT, "version": VERSION, "step": step, "config": to_dict(self._config)}
        meta |= {"data": self._data} if self._data else {}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.PyTreeSave(params),
                optimizer=ocp.args.PyTreeSave(optimizer),
                meta=ocp.args.JsonSave(meta),
            ),
            force=True,
        )

    def close(self) -> None:
        """Wait until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()


def steps(folder: pathlib.Path) -> list[int]:
    """The finished checkpoints below `folder`, oldest first. One that is being written does not count."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit() and p.is_dir())


def open_checkpoint(path: str | pathlib.Path) -> Checkpoint:
    """The checkpoint at `path`: a run's folder, its `checkpoints/` (the newest of them), or one step's folder.

    Raises UserError where there is none, or something else.
    """
    path = pathlib.Path(path).expanduser().absolute()
    if not path.exists():
        raise UserError(f"there is no checkpoint at {str(path)!r}")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not folder.is_dir():
        raise UserError(f"{str(path)!r} is a file; a checkpoint is a folder that `ladder-jax train` wrote")
    if found := steps(folder):
        folder = folder / str(found[-1])
    meta = _meta(folder, path)
    return Checkpoint(folder, meta["step"], from_dict(meta["config"]), meta.get("data"))


def _meta(folder: pathlib.Path, asked: pathlib.Path) -> dict:
    file = folder / "meta" / "metadata"
    if not file.is_file():
        raise UserError(f"{str(asked)!r} holds no ladder_jax checkpoint")
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"checkpoint {str(folder)!r} is damaged or incomplete: its meta is not JSON") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(f"{str(folder)!r} is a checkpoint of another program, not of ladder_jax")
    if meta.get("version") != VERSION:
        raise UserError(
            f"checkpoint {str(folder)!r} has format version {meta.get('version')}; this ladder_jax reads {VERSION}"
        )
    return meta


def _check_readable(folder: pathlib.Path, like: Any) -> None:
    """Read every stored value once, a few at a time; raises an error for the first that is bad or missing.

    It costs a second read, from the page cache as a rule. Where Orbax meets a bad value itself, it
    abandons the reads in flight, and their complaints bury the one line that the user needs.
    """
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}).result()
    stored = [key.decode() for key in store.list().result()]
    if missing := {name.replace("/", ".") for name in _shapes(like)} - {key.partition("/")[0] for key in stored}:
        raise ValueError(f"{sorted(missing)[0]} is not there")
    for keys in itertools.batched(stored, 16):
        for key, read in [(key, store.read(key)) for key in keys]:
            if not read.result().value:
                raise ValueError(f"the data of {key.partition('/')[0]} is not there")


def _check_shapes(stored: Any, like: Any, folder: pathlib.Path) -> None:
    """Refuse arrays that are missing, foreign or of another shape, but for the padded vocabulary."""
    have, want = _shapes(stored), _shapes(like)
    for name in sorted(have.keys() | want.keys()):
        a, b = have.get(name), want.get(name)
        padded = name.endswith("table") and a is not None and b is not None and a[1:] == b[1:]
        if a != b and not padded:
            raise UserError(f"checkpoint {str(folder)!r} does not fit its configuration: {name} is {a}, not {b}")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Shapes by name: "layers/mlp/up"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {"/".join(str(getattr(key, "key", key)) for key in path): tuple(leaf.shape) for path, leaf in leaves}


def _first_line(error: BaseException) -> str:
    while error.__cause__:  # the innermost says what is wrong with which file
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
