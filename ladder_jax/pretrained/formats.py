"""Open a model by its name: a checkpoint, a Hugging Face folder, a GGUF file, or `org/name` of the
Hub.
"""

import dataclasses
import difflib
import enum
import hashlib
import os
import pathlib
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ladder_jax import nn, parallel, side
from ladder_jax.checkpoint import Checkpoint, Pieces, open_checkpoint
from ladder_jax.config import (
    PRESETS,
    RESIDUALS,
    DecodeConfig,
    ExpertParallelism,
    FolderConfig,
    MeshConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    parse_residual,
)
from ladder_jax.config.fields import check_type
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode import Engine, Generator, default_tensor
from ladder_jax.decode.generate import DEFAULT
from ladder_jax.decode.weights import Reader
from ladder_jax.errors import UserError, unknown
from ladder_jax.files import (
    AnyPath,
    absolute,
    check_storable,
    explained,
    is_remote,
    local_path,
    on_disk,
    reading,
)
from ladder_jax.nn import ModelDef, Params
from ladder_jax.parallel import NamedMesh
from ladder_jax.pretrained import checkpoints, gguf, hub, staging
from ladder_jax.pretrained.huggingface import config as huggingface_config, folder as huggingface
from ladder_jax.pretrained.source import REFIT, Source, assemble, reader, refit_in


class Format(enum.Enum):
    """A format to write."""

    CHECKPOINT = "checkpoint"  # of ladder_jax, in a folder like a run's
    HUGGING_FACE = "huggingface"


FORMS = "a run's folder, a Hugging Face folder, a GGUF file, or org/name of the Hugging Face Hub"
_SAMPLES = 256  # blocks of a file in a model's identity
_BLOCK = 2**16  # bytes of each


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A model by its name, of which only the description has been read.

    name: for messages; of the Hub, with the commit. path: the folder or file. on_hub: whether it is
        the Hub's copy.
    config: of a checkpoint, its run's. Of other formats, the model's, with the context as
        train.sequence.
    weights: what reads them.
    """

    name: str
    path: AnyPath
    config: RunConfig
    weights: Checkpoint | Source
    on_hub: bool = False

    def tokenizer(self) -> Tokenizer:
        """Raises UserError if there is none, or it does not fit the model."""
        tokenizer = self.weights.tokenizer
        if isinstance(self.weights, Checkpoint):
            return tokenizer()
        if tokenizer is None:
            raise UserError(f"{self.name!r} has no tokenizer")
        return tokenizer

    def __repr__(self) -> str:
        return (
            f"OpenedModel({self.name!r}, a {type(self.weights).__name__})\n  {self.config.model!r}"
        )

    @property
    def has_tokenizer(self) -> bool:
        if isinstance(self.weights, Source):
            return self.weights.tokenizer is not None
        folder = self._folder / tokenizers.FOLDER
        return folder.exists() or self.config.data.tokenizer == tokenizers.BYTES

    @property
    def refit(self) -> bytes | None:
        """What `convert` says of its refit of the weights, which then belong to this model's
        topology alone; None without one.
        """
        return refit_in(self._folder)

    @property
    def _folder(self) -> AnyPath:
        """Of a run; else the model's own."""
        if isinstance(self.weights, Checkpoint):
            return self.weights.path.parent.parent
        return self.path

    def define(self, *, tensor: int | None = None, data: int = 1) -> ModelDef:
        """On `data` x `tensor` devices; by default on as many as the model was trained on, if there
        are as many.
        """
        tensor = default_tensor(self.config) if tensor is None else tensor
        mesh = parallel.make_mesh(data=data, tensor=tensor)
        return define(self.config.model, mesh=mesh)

    def reader(self, definition: ModelDef) -> Reader:
        """What reads the arrays onto their devices one at a time, in the stored dtypes."""
        if isinstance(self.weights, Checkpoint):
            return Pieces(self.weights, definition)
        return reader(self.weights, definition)

    def params(self, definition: ModelDef, *, dtype: np.dtype | None = None) -> Params:
        """All parameters, stacked as in training, read one at a time. dtype: of all; None keeps the
        stored dtypes.
        """
        if isinstance(self.weights, Checkpoint) and dtype == np.float32:
            return self.weights.params(definition)
        return assemble(definition, self.reader(definition), dtype=dtype)

    @property
    def identity(self) -> str:
        """A string that differs for other weights: of files that have no manifest, from samples of
        their contents.
        """
        if isinstance(self.weights, Checkpoint):
            return self.weights.identity
        return _sampled(self.path)

    def generator(
        self, *, settings: DecodeConfig = DEFAULT, tensor: int | None = None
    ) -> Generator:
        """settings: of them loop and quantize; `tensor` as in `define`."""
        definition = self.define(tensor=tensor)
        return Generator(
            definition, self.reader(definition), loop=settings.loop, quantize=settings.quantize
        )

    def engine(
        self,
        *,
        settings: DecodeConfig = DEFAULT,
        tensor: int | None = None,
        **about: Any,
    ) -> Engine:
        """settings: `prefill_chunk` to `quantize` of the section `decode`; `tensor` as in `define`;
        the rest as in Engine.
        """
        definition = self.define(tensor=tensor)
        return Engine(
            definition,
            self.reader(definition),
            launch=settings.launch,
            prefill_chunk=settings.prefill_chunk,
            interleave=settings.interleave.parts,
            loop=settings.loop,
            quantize=settings.quantize,
            **about,
        )


def define(
    config: ModelConfig,
    *,
    mesh: Mesh | NamedMesh,
    experts: ExpertParallelism | str = ExpertParallelism.REDUCE,
) -> ModelDef:
    """As `nn.define`, of a model with or without a side network (`config.side`)."""
    package = nn if config.side is None else side
    return package.define(config, mesh=mesh, experts=experts)


def open_model(
    name: str | os.PathLike,
    *,
    ladder_layers: str | None = None,
    residual: str | None = None,
    ranks: int | None = None,
) -> OpenedModel:
    """The model called `name`: a run's folder or a checkpoint in it, a Hugging Face folder, a GGUF
    file, or `org/name[@revision]` of the Hub (`org/name/FILE.gguf`, where it holds several), which
    is downloaded.

    Reads only headers, and the head of a tied model whose files hold one. ladder_layers, residual,
    ranks: convert it, see `with_ladder_layers`. Raises UserError where there is no such model, for
    other formats, damaged files, and models that cannot be represented.
    """
    path, identifier = locate(name)
    shown = str(identifier or name)
    if _is_checkpoint(path):
        weights = open_checkpoint(path)
        config = weights.config
    else:
        weights = open_source(path)
        if identifier:
            called = identifier.repository
        elif path.is_file():
            called = path.stem
        else:
            called = path.absolute().name
        run = FolderConfig(name=called)
        config = RunConfig(model=weights.model, train=weights.train_config, run=run)
    model = with_ladder_layers(
        config.model, ladder_layers=ladder_layers, residual=residual, ranks=ranks, name=shown
    )
    opened = OpenedModel(shown, path, _of_inference(config, model), weights, identifier is not None)
    if ladder_layers is not None:
        check_not_refitted(opened.refit, name=shown)
    return opened


def _of_inference(config: RunConfig, model: ModelConfig) -> RunConfig:
    """`config` with `model`; with another than its own, without the settings of its training, which
    may not suit that one.
    """
    if model == config.model:
        return config
    tensor = config.mesh.tensor
    return RunConfig(
        model=model,
        mesh=MeshConfig(tensor=tensor if model.ranks in (None, tensor) else 1),
        train=TrainConfig(start=config.train.start, batch=1, sequence=config.train.sequence),
        decode=config.decode,
        data=config.data,
        run=config.run,
    )


def open_source(name: str | os.PathLike) -> Source:
    """As `open_model`, with every format as a Source: for exports, conversions, and `load`."""
    path, _ = locate(name)
    if is_remote(path):
        raise UserError(
            f"{str(name)!r}: copy it to a disk first; generate, serve and evaluate read it from there"
        )
    if _is_checkpoint(path):
        return checkpoints.read(path)
    if path.is_dir():
        return huggingface.read(path)
    return gguf.read(path)


def save(source: Source, destination: str | os.PathLike, *, format: Format) -> None:
    """Write `source` to the folder `destination`, new or empty, which appears when all is written.

    The host holds one array at a time. Raises UserError if `destination` is not empty, and for what
    the format cannot express; RunFailed if writing fails, as for a full disk. Unfinished files are
    removed.
    """
    check_type("source", source, Source)
    check_type("destination", destination, str, os.PathLike)
    place = on_disk(destination).absolute()
    if format is Format.CHECKPOINT:
        check_storable("", place)
    staging.check_room(place, size=source.nbytes)
    with staging.staged(place) as folder:
        write(source, folder, format=format, place=place)


def write_huggingface(source: Source, destination: str | os.PathLike) -> None:
    """`save` as a Hugging Face folder: config.json, safetensors, tokenizer and generation
    config.
    """
    save(source, destination, format=Format.HUGGING_FACE)


def write(source: Source, folder: pathlib.Path, *, format: Format, place: pathlib.Path) -> None:
    """Write `source` into the new `folder`, which will be renamed to `place`.

    Raises UserError for what the format cannot express, RunFailed if writing fails.
    """
    if format is Format.CHECKPOINT:
        checkpoints.write(source, folder, place=place)
    else:
        huggingface.write(source, folder)
    if source.refit is not None:
        (folder / REFIT).write_bytes(source.refit)


def model_config(name: str | os.PathLike) -> ModelConfig:
    """The configuration of the model called `name`, as in `open_model`. Of a Hugging Face folder
    only config.json is read, and of one on the Hub only that is downloaded.
    """
    path, _ = locate(name, weights=False)
    if _is_checkpoint(path):
        return open_checkpoint(path).config.model
    if path.is_dir():
        return huggingface_config.read(
            huggingface.read_object(path / huggingface.CONFIG), where=str(path / huggingface.CONFIG)
        )
    return gguf.read(path).model


def locate(
    name: str | os.PathLike, *, weights: bool = True
) -> tuple[AnyPath, hub.Identifier | None]:
    """The folder or file of the model called `name`; downloaded if it is on the Hub, and then its
    name with the commit.

    weights: whether they are read, too. Raises UserError where there is none. A name is one of the
    Hub only if nothing here has its first part, such as `runs` of `runs/tine`; `hf://org/name`
    always is.
    """
    check_type("name", name, str, os.PathLike)
    given = str(name)
    on_hub = given.startswith(hub.PREFIX)
    if is_remote(name) and not on_hub:
        path = absolute(name)
        with explained(path, "read"):
            if not _is_checkpoint(path):
                raise UserError(
                    f"there is no model at {given!r}: only runs and checkpoints are read from there"
                )
        return path, None
    path = local_path(name)
    if path.exists():
        return path, None
    identifier = hub.Identifier.parse(given)
    is_local = identifier is None or pathlib.Path(path.parts[0]).exists()
    if is_local and not on_hub:
        raise UserError(_nothing_at(path))
    if identifier is None:
        raise UserError(
            f"{given!r} is no model of the Hugging Face Hub: write hf://org/name[@revision]"
        )
    return hub.download(identifier, weights=weights)


def with_ladder_layers(
    model: ModelConfig,
    *,
    ladder_layers: str | None,
    residual: str | None,
    ranks: int | None,
    name: str,
) -> ModelConfig:
    """`model` with other layers' topology: N (the last N), `i,j` or all of them become `residual`,
    by default ladder.

    ranks: for ladder-fresh, whose function depends on their number. name: of the model, for
    messages. Raises UserError for a model that is not standard, and for a kind that is no ladder.
    """
    if ladder_layers is None:
        for option, value in (("residual", residual), ("ranks", ranks)):
            if value is not None:
                raise UserError(f"{option} needs ladder_layers, the layers to convert")
        return model
    kind = residual or "ladder"
    parsed = parse_residual(kind)
    if not parsed.is_ladder:
        allowed = [residual for residual in RESIDUALS if parse_residual(residual).is_ladder]
        raise unknown("ladder kind in residual", kind, [*allowed, "ladder-K"])
    if parsed.depends_on_ranks and ranks is None:
        raise UserError(
            f"residual {kind} computes another function for each number of ranks: set ranks, too"
        )
    if model.residual not in ("standard", kind):
        raise UserError(f"ladder_layers converts a standard model; {name!r} is {model.residual}")
    return dataclasses.replace(model, residual=kind, ladder_layers=ladder_layers, ranks=ranks)


def check_not_refitted(refit: bytes | None, *, name: str) -> None:
    """Raises UserError for weights with a `refit`, of which other layers cannot be chosen."""
    if refit is not None:
        raise UserError(
            f"the weights of {name!r} were refitted for their own layers: leave ladder_layers out, or name the"
            " model that was converted"
        )


def _is_checkpoint(path: AnyPath) -> bool:
    """Whether it is this library's own: a run's folder has a config.json as Hugging Face's do, but
    its sections.
    """
    if (
        not path.is_dir()
        or not (path / huggingface.CONFIG).is_file()
        or (path / "checkpoints").is_dir()
    ):
        return path.is_dir()
    return "run" in huggingface.read_object(path / huggingface.CONFIG)


def _nothing_at(path: pathlib.Path) -> str:
    name = str(path)
    if name in PRESETS:
        return f"{name!r} is a preset, a shape without weights; a model is {FORMS}"
    folder = path.parent
    beside = [file.name for file in folder.glob("*")]
    near = difflib.get_close_matches(path.name, beside, n=1)
    hint = ""
    if near:
        hint = f"; did you mean {str(folder / near[0])!r}?"
    return f"there is no model at {name!r}{hint} (allowed: {FORMS})"


def _sampled(path: pathlib.Path) -> str:
    """A digest of a model's files: of each, its size and evenly spaced blocks."""
    digest = hashlib.blake2b(digest_size=16)
    files = [path]
    if not path.is_file():
        files = [path / huggingface.CONFIG, *sorted(path.glob("*.safetensors"))]
    for file in files:
        with reading(file), file.open("rb") as content:
            size = file.stat().st_size
            about = f"{file.name} {size}\n" if path.is_dir() else str(size)
            digest.update(about.encode())
            last = max(0, size - _BLOCK)
            for index in range(_SAMPLES):
                content.seek(index * last // (_SAMPLES - 1))
                digest.update(content.read(_BLOCK))
    return digest.hexdigest()
