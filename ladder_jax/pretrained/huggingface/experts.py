"""The tensors of a layer's experts in Qwen2-MoE, Qwen3-MoE, OLMoE and Mixtral: one for each, or one for all of them."""

import functools
import pathlib
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from ladder_jax.config import ModelConfig
from ladder_jax.errors import UserError
from ladder_jax.nn.parameter import LAYERS, stacks
from ladder_jax.pretrained.huggingface.tensors import Pending, Tensor
from ladder_jax.pretrained.source import Key, Stored

BLOCKS = "mlp", "block_sparse_moe"
"""What the sublayer is called; the second by Mixtral, whose experts' matrices are w1, w3 and w2."""
MATRICES = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}


def take(remaining: dict[str, Tensor], model: ModelConfig, *, folder: pathlib.Path) -> dict[Key, Stored]:
    """The arrays of routers and experts, whose tensors are removed from `remaining`.

    Raises UserError where one is missing or has another shape.
    """
    return {
        Key(f"layers/mlp/{name}", place): stored
        for place, layer in enumerate(stacks(model)[LAYERS])
        for name, stored in _Layer(remaining, model, layer, folder).arrays().items()
    }


def give(
    key: Key, stored: Stored, *, model: ModelConfig, model_type: str, dtype: np.dtype | None
) -> dict[str, Pending]:
    """The tensors to write of an array of routers or experts: one for each expert."""
    *_, group, name = key.name.split("/")
    mixtral = model_type == "mixtral"
    block = f"model.layers.{key.layers(model)[key.layer]}.{BLOCKS[mixtral]}."
    dtype = dtype or np.dtype(stored.dtype)
    if group == "experts":
        theirs, (count, *shape) = MATRICES[name][mixtral], stored.shape
        values = lambda expert: Pending((*shape[::-1],), dtype, lambda: newest(stored)[expert].T)
        return {f"{block}experts.{expert}.{theirs}.weight": values(expert) for expert in range(count)}
    if name == "share":
        return {f"{block}shared_expert_gate.weight": Pending((1, *stored.shape), dtype, lambda: stored.read()[None])}
    theirs = "gate" if name == "router" else f"shared_expert.{MATRICES[name][0]}"
    return {f"{block}{theirs}.weight": Pending(stored.shape[::-1], dtype, lambda: stored.read().T)}


@functools.lru_cache(maxsize=1)
def newest(stored: Stored) -> np.ndarray:
    """The values of the array that was read last, whose experts are written one after another."""
    return stored.read()


class _Layer:
    def __init__(self, remaining: dict[str, Tensor], model: ModelConfig, layer: int, folder: pathlib.Path):
        self._remaining, self._model, self._folder = remaining, model, folder
        names = [f"model.layers.{layer}.{block}." for block in BLOCKS]
        self._block = next((name for name in names if f"{name}gate.weight" in remaining), names[0])
        self._spelling = BLOCKS.index(self._block.split(".")[-2])

    def arrays(self) -> dict[str, Stored]:
        moe, d_model = self._model.moe, self._model.d_model
        arrays = {"router": _stored([self._take("gate.weight", (moe.experts, d_model))], lambda a: a.T)}
        arrays |= self._fused() if f"{self._block}experts.gate_up_proj" in self._remaining else self._experts()
        if moe.shared_width:
            for name, (theirs, _) in MATRICES.items():
                shape = self._shape(name, moe.shared_width)
                tensor = self._take(f"shared_expert.{theirs}.weight", shape)
                arrays[f"shared/{name}"] = _stored([tensor], lambda a: a.T)
        if moe.shared_gate:
            share = self._take("shared_expert_gate.weight", (1, d_model))
            arrays["shared/share"] = _stored([share], lambda a: a[0])
        return arrays

    def _experts(self) -> dict[str, Stored]:
        """One tensor a matrix of an expert, [out, in]."""
        moe, arrays = self._model.moe, {}
        stack = lambda *each: np.stack([a.T for a in each])
        for name, spellings in MATRICES.items():
            theirs, shape = spellings[self._spelling], self._shape(name, moe.expert_width)
            tensors = [self._take(f"experts.{e}.{theirs}.weight", shape) for e in range(moe.experts)]
            arrays[f"experts/{name}"] = _stored(tensors, stack)
        return arrays

    def _fused(self) -> dict[str, Stored]:
        """All experts' gates and ups in one tensor [E, 2 M, D], and their downs in another, [E, D, M]."""
        moe, d_model = self._model.moe, self._model.d_model
        both = self._take("experts.gate_up_proj", (moe.experts, 2 * moe.expert_width, d_model))
        down = self._take("experts.down_proj", (moe.experts, d_model, moe.expert_width))
        return {
            "experts/gate": _stored([both], lambda a: a[:, : moe.expert_width].swapaxes(1, 2)),
            "experts/up": _stored([both], lambda a: a[:, moe.expert_width :].swapaxes(1, 2)),
            "experts/down": _stored([down], lambda a: a.swapaxes(1, 2)),
        }

    def _shape(self, name: str, width: int) -> tuple[int, int]:
        return (self._model.d_model, width) if name == "down" else (width, self._model.d_model)

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        name = self._block + name
        if name not in self._remaining:
            raise UserError(f"{str(self._folder)!r} holds no {name}")
        tensor = self._remaining.pop(name)
        if tensor.shape != shape:
            raise UserError(f"{str(tensor.file)!r}: {name} is {tensor.shape}, but {shape} by its config.json")
        return tensor


def _stored(tensors: list[Tensor], ours: Callable[..., np.ndarray]) -> Stored:
    """`ours` of the tensors' values: its shape is found without reading, from values that take no memory."""
    dtype = functools.reduce(jnp.promote_types, {tensor.dtype for tensor in tensors})
    empty = [np.broadcast_to(np.zeros((), np.int8), tensor.shape) for tensor in tensors]
    read = lambda: ours(*(tensor.read() for tensor in tensors)).astype(dtype, copy=False)
    return Stored(ours(*empty).shape, dtype, read)
