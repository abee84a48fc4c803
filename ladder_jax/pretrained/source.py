"""What every form of a pretrained model becomes on its way in or out: a configuration, and arrays read one at a time.

A format's reader makes a Source; loading onto a mesh, exporting and converting need no other knowledge of it.
"""

import dataclasses
import json
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ladder_jax.config import ModelConfig
from ladder_jax.errors import UserError
from ladder_jax.nn import model_def, parameter

EMPTY: Mapping[str, Any] = types.MappingProxyType({})


class Key(NamedTuple):
    """One array: its name in our checkpoints, such as "layers/attention/query", and of those its 0-based layer.

    `layer` is None for what no layer has: "embedding/table", "final_norm/scale", "head/table".
    """

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array where it lies. `read` gives its values, of that shape and dtype, anew at every call.

    shape: in our layout, of one layer, the vocabulary without padding: query is [D, N, H], a table [V, D].
    dtype: as stored (ml_dtypes has bfloat16). What `read` gives may be a read-only view of a mapped file: do not
    keep it, or memory grows.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Source:
    """A model as found somewhere, nothing of it read yet but its description.

    path: where, for messages.
    model: its configuration; the residual topology is standard, unless the source names one.
    arrays: one entry a layer and array: exactly `wanted(model)`'s keys, which `check` verifies.
    context: the longest sequence that it was made for, in tokens; None where nothing says so.
    files: its tokenizer's and chat template's files under Hugging Face's names (tokenizer.json, ...), by content.
    generation: what Hugging Face's generation_config.json says (eos_token_id, temperature, ...), or the like.
    """

    path: str
    model: ModelConfig
    arrays: Mapping[Key, Stored]
    context: int | None = None
    files: Mapping[str, bytes] = EMPTY
    generation: Mapping[str, Any] = EMPTY


def dims(model: ModelConfig) -> dict[str, str]:
    """The dimensions of every array by its name, of one layer: {"layers/attention/query": "DNH", ...}.

    Letters as in nn.parameter; a name that begins with "layers/" stands for one array a layer.
    """
    modules = model_def.declare(model, ranks=1)
    nested = {name: parameter.dims_of(module) for name, module in modules.items()}
    return {name: found.removeprefix("L") for name, found in _flat(nested).items()}


def wanted(model: ModelConfig) -> dict[Key, tuple[int, ...]]:
    """Every array of a model, and its shape in a Source: one layer's, the vocabulary without padding."""
    sizes = parameter.Sizes(model)
    found = {}
    for name, letters in dims(model).items():
        shape = tuple(model.vocab_size if letter == "V" else sizes[letter] for letter in letters)
        layers = range(model.num_layers) if name.startswith("layers/") else (None,)
        found |= {Key(name, layer): shape for layer in layers}
    return found


def check_layers(model: ModelConfig, *, tensors: int, path: str) -> None:
    """Raises UserError where `path` has fewer tensors than its configuration has layers.

    Before `wanted`: to name what is missing of a million layers would take hours.
    """
    if tensors < model.num_layers:
        raise UserError(
            f"{path!r} holds {tensors} tensors, fewer than the {model.num_layers} layers that it says it has"
        )


def check(source: Source) -> Source:
    """`source`, if it has every array of its model in the right shape and no other, and a tokenizer that fits.

    Raises UserError.
    """
    shapes = wanted(source.model)
    for key in source.arrays.keys() - shapes.keys():
        raise UserError(f"{source.path!r} holds {key}, for which its configuration has no place")
    for key, shape in shapes.items():
        if key not in source.arrays:
            raise UserError(f"{source.path!r} lacks {key}")
        if tuple(source.arrays[key].shape) != shape:
            raise UserError(f"{source.path!r}: {key} is {tuple(source.arrays[key].shape)}, not {shape}")
    tokens = _tokens(source)
    if tokens > source.model.vocab_size:
        raise UserError(
            f"{source.path!r}: its tokenizer.json numbers {tokens} tokens, but the model has {source.model.vocab_size}"
        )
    return source


def _tokens(source: Source) -> int:
    """One more than the last token of its tokenizer.json; 0 where there is none."""
    if "tokenizer.json" not in source.files:
        return 0
    try:
        told = json.loads(source.files["tokenizer.json"])
        vocabulary = told["model"]["vocab"]  # numbers by name, or a list
        numbers = vocabulary.values() if isinstance(vocabulary, Mapping) else range(len(vocabulary))
        return 1 + max([*numbers, *(token["id"] for token in told.get("added_tokens") or ())], default=-1)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{source.path!r}: tokenizer.json is not a tokenizer: {error!r}") from None


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found = {}
    for name, below in nested.items():
        path = f"{prefix}{name}"
        found |= _flat(below, f"{path}/") if isinstance(below, Mapping) else {path: below}
    return found
