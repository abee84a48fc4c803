"""The common representation of a pretrained model in any format: a configuration, and arrays that
are read lazily, one at a time, into memory or onto a mesh.

Each format's reader returns a Source. Loading, exporting and converting need only that.
"""

import dataclasses
import functools
import json
import math
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from ladder_jax import nn, parallel
from ladder_jax.config import DecodeConfig, Loop, ModelConfig, TrainConfig
from ladder_jax.config.fields import check_type, shown
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode import weights
from ladder_jax.decode.weights import Reader
from ladder_jax.errors import UserError
from ladder_jax.files import AnyPath, reading
from ladder_jax.nn import model_def, parameter
from ladder_jax.nn.parameter import stack_of, stacks
from ladder_jax.parallel import mesh as meshes

REFIT = "refit.json"
"""The file, in a model's folder, that says what a refit did: its weights are made for their own
topology alone.
"""
EMPTY: Mapping[str, Any] = types.MappingProxyType({})

type Shape = tuple[int, ...]
type Arrays = Mapping[Key, Stored]


class Key(NamedTuple):
    """One array: its name in our checkpoints, such as "layers/attention/query", and its layer in
    that stack, from 0.

    `layer` is None for arrays outside the layers: "embedding/table", "final_norm/scale",
    "head/table".
    """

    name: str
    layer: int | None = None

    @classmethod
    def of_layer(cls, layer: int, array: str, *, model: ModelConfig) -> "Key":
        """Of the model's layer `layer`, counted over all stacks: `array` is "attention/query",
        say.
        """
        stack, place = stack_of(model, layer)
        return cls(f"{stack}/{array}", place)

    def layers(self, model: ModelConfig) -> range:
        """Which layers of the model the array's stack holds: of the stack's first one the number is
        not always 0.
        """
        return stacks(model)[self.name.partition("/")[0]]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A stored array. `read` reads its values, with this shape and dtype, from the file at every
    call.

    shape: in our layout, of one layer, without the vocabulary's padding: query is [D, N, H], a
        table [V, D].
    dtype: as stored (ml_dtypes has bfloat16). `read` may return a read-only view.
    """

    shape: Shape
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Source:
    """A model in some format, of which only the description has been read.

    path: for messages.
    model: the configuration; the residual topology is standard, unless the source names one.
    arrays: one entry for each layer of each array, with exactly the keys of
        `expected_shapes(model)`.
    context: the longest sequence that the model was trained for, in tokens; None if unknown.
    files: the contents of the tokenizer's files by Hugging Face's names: tokenizer.json,
        chat_template.jinja, ...
    generation: the settings of Hugging Face's generation_config.json: eos_token_id, temperature,
        ...
    refit: the content of REFIT; None without a refit.
    decode: the settings of `generate`, of our checkpoints alone.
    is_bytes: whether the tokens are bytes, also where the vocabulary has more than these.
    """

    path: str
    model: ModelConfig
    arrays: Arrays = dataclasses.field(repr=False)
    context: int | None = None
    files: Mapping[str, bytes] = dataclasses.field(default=EMPTY, repr=False)
    generation: Mapping[str, Any] = EMPTY
    refit: bytes | None = dataclasses.field(default=None, repr=False)
    decode: DecodeConfig = DecodeConfig()
    is_bytes: bool = False

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Of `files`; without any, bytes for 256 tokens, and for more if `is_bytes`, else None.

        Raises UserError for an unsupported tokenizer, and for one with more tokens than the model.
        """
        of_bytes = tokenizers.Bytes()
        more = self.model.vocab_size - of_bytes.vocab_size
        if not self.files and (more == 0 or self.is_bytes and more > 0):
            return of_bytes
        if tokenizers.MAIN not in self.files:
            return None
        files = dict(self.files)
        if self.generation:
            settings = json.dumps(dict(self.generation), indent=2) + "\n"
            files[tokenizers.GENERATION] = settings.encode()
        tokenizer = tokenizers.HuggingFace(files, where=self.path)
        tokenizers.check_vocabulary(tokenizer, vocab_size=self.model.vocab_size, path=self.path)
        return tokenizer

    @functools.cached_property
    def dtypes(self) -> dict[str, np.dtype]:
        """Of each array by name, one that holds the values of all its layers."""
        found = {}
        for key, array in self.arrays.items():
            before = found.get(key.name, array.dtype)
            found[key.name] = jnp.promote_types(before, array.dtype)
        return found

    @property
    def train_config(self) -> TrainConfig:
        """The section of a run's configuration that has the context."""
        if self.context is None:
            return TrainConfig()
        return TrainConfig(batch=1, sequence=self.context)  # a batch has fewer than 2**31 tokens

    @property
    def parameters(self) -> int:
        return sum(math.prod(array.shape) for array in self.arrays.values())

    @property
    def nbytes(self) -> int:
        """Of all arrays, as stored."""
        return sum(array.nbytes for array in self.arrays.values())

    __repr__ = shown


def from_file(
    path: str | pathlib.Path, dtype: np.dtype, shape: Shape, *, offset: int
) -> np.ndarray:
    """Values at `offset` bytes. Raises UserError if the file cannot be read, or is shorter than
    when it was opened.
    """
    values = np.empty(shape, dtype)
    # np.fromfile takes a disk's error for the end of the file
    with reading(path), open(path, "rb") as file:
        file.seek(offset)
        done = file.readinto(values.reshape(-1).view(np.uint8))
    if done != values.nbytes:
        raise UserError(f"{str(path)!r} was cut short: it was complete when it was opened")
    return values


def content(file: AnyPath) -> bytes:
    """Raises UserError if the file cannot be read."""
    with reading(file):
        return file.read_bytes()


def dims(model: ModelConfig) -> dict[str, str]:
    """The dimensions of each array by name: {"layers/attention/query": "DNH", ...}.

    Letters as in nn.parameter. A name that begins with one of STACKS stands for one array in each
    of its layers.
    """
    modules = model_def.declare(model, ranks=1)
    nested = {name: parameter.dims_of(module) for name, module in modules.items()}
    flat = traverse_util.flatten_dict(nested, sep="/")
    return {name: letters.removeprefix("L") for name, letters in flat.items()}


def expected_shapes(model: ModelConfig) -> dict[Key, Shape]:
    """The shapes of all arrays of a model, as a Source has them: of one layer, without the
    vocabulary's padding.
    """
    sizes = parameter.Sizes(model)
    shapes = {}
    for name, letters in dims(model).items():
        shape = tuple(model.vocab_size if letter == "V" else sizes[letter] for letter in letters)
        layers = stacks(model).get(name.partition("/")[0], ())
        for layer in range(len(layers)) or [None]:
            shapes[Key(name, layer)] = shape
    return shapes


def stored(model: ModelConfig, array_of: Callable[[str], Any]) -> Arrays:
    """All arrays of a model, of those that `array_of` gives by name: jax's or tensorstore's, of
    layers stacks, with padding of the vocabulary and the experts.
    """
    arrays = {}
    for key, shape in expected_shapes(model).items():
        array = array_of(key.name)
        read = functools.partial(_values, array, key, shape)
        arrays[key] = Stored(shape, np.dtype(array.dtype.name), read)
    return arrays


def _values(array: Any, key: Key, shape: Shape) -> np.ndarray:
    if key.layer is not None:
        array = array[key.layer]
    if isinstance(array, jax.Array):  # whose sharding may not divide the rows that are wanted
        array = np.asarray(array)
    return np.asarray(array[: shape[0]])


def check_alone(model: ModelConfig, *, path: str) -> None:
    """Raises UserError for a model with a side network, which no format has."""
    if model.side is not None:
        raise UserError(
            f"{path!r} has a side network (model.side), which no other format has: generate, serve, evaluate and"
            " train read the checkpoint itself"
        )


def refit_in(folder: AnyPath) -> bytes | None:
    """The content of REFIT in a model's folder, if there is one."""
    file = folder / REFIT
    if file.is_file():
        return content(file)
    return None


# Onto a mesh. The host holds at most one array at a time.


def load(
    source: Source, *, mesh: jax.sharding.Mesh | parallel.NamedMesh, dtype: np.dtype | None = None
) -> nn.Params:
    """The parameters on `mesh` (axes data, fsdp, tensor), with the shardings of
    `nn.define(source.model, mesh=mesh)`.

    dtype: of all arrays; None keeps the stored dtypes (a stack gets one that holds the values of
    all its layers). Raises UserError if the model cannot be split over the mesh.
    """
    check_type("source", source, Source)
    mesh = parallel.mesh_of(mesh)
    definition = nn.define(
        parallel.with_ranks(source.model, tensor=mesh.shape["tensor"]), mesh=mesh
    )
    return assemble(definition, reader(source, definition), dtype=dtype)


def assemble(definition: nn.ModelDef, read: Reader, *, dtype: np.dtype | None = None) -> nn.Params:
    """The parameters of `definition`, read one by one; `dtype` as in `load`."""
    store = lambda array, dims: array if dtype is None else array.astype(dtype)
    return weights.assemble(definition, read, store, loop=Loop.SCAN)


def load_layer(source: Source, definition: nn.ModelDef, number: int | None) -> nn.Params:
    """The parameters of one layer, counted over all stacks; None: what stands outside of the
    layers.
    """
    stack, place = ("", None) if number is None else stack_of(definition.config, number)
    keys = [key for key in source.arrays if key.layer == place and key.name.startswith(stack)]
    names = [key.name.removeprefix(f"{stack}/") for key in keys]
    arrays = zip(names, reader(source, definition)(keys), strict=True)
    return traverse_util.unflatten_dict(dict(arrays), sep="/")


def reader(source: Source, definition: nn.ModelDef) -> Reader:
    """Reads arrays onto their devices one at a time, for `Engine(definition,
    pretrained.reader(source, definition))`.

    The engine casts or quantizes each array before the next is read.
    """

    def place(key: Key) -> jax.Array:
        """Padded with zeros to the shape in `definition`. The host holds the array and its
        shards.
        """
        name, _ = key
        piece = definition.pieces[name]
        dtype = source.dtypes[name]
        values = source.arrays[key].read()
        return meshes.place(lambda index: _copy(values[index], dtype), piece.shape, piece.sharding)

    return lambda keys: map(place, keys)


def _copy(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A contiguous copy. A CPU device may use its buffer itself; a view would keep the whole array
    in memory.
    """
    if values.dtype != dtype:
        return np.array(values, dtype, order="C")
    # Copied as integers: NumPy copies bfloat16 value by value, 15 times slower.
    return np.array(values.view(f"u{dtype.itemsize}"), order="C").view(dtype)
