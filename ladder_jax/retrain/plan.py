"""Which parts of a model a retraining run trains, and which arrays it keeps frozen beside them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ladder_jax.config import START, ConversionConfig, DistillConfig, LoraConfig
from ladder_jax.nn import ModelDef, Params, parameter
from ladder_jax.nn.parameter import LAYERS
from ladder_jax.nn.router_losses import RouterLosses
from ladder_jax.retrain import lora as factors
from ladder_jax.side import SIDE, SideModel

ADAPTERS = "adapters"
"""The part of the trained parameters that holds LoRA's factors."""
LOWER = "lower"
"""The part that holds the lowest layers, see below."""


@dataclasses.dataclass(frozen=True)
class RetrainPlan:
    """frozen_layers: the lowest ones, and with them the embedding. teacher: its definition, on the
    same mesh; with distill.teacher=start its weights are those that training starts from, so frozen
    parts are stored once for both.

    Frozen parameters are {"model": parts, "teacher": parts} (see below): the model's that
    no step changes, and the teacher's that are not among them, its matrices but for the routers in
    the compute dtype. Empty ones are left out.
    """

    definition: ModelDef
    frozen_layers: int = 0
    lora: LoraConfig = LoraConfig()
    distill: DistillConfig = DistillConfig()
    conversion: ConversionConfig = ConversionConfig()
    teacher: ModelDef | None = None

    @functools.cached_property
    def trained_dims(self) -> Params:
        if self.lora.rank:
            return {ADAPTERS: parameter.dims_of(self.adapters)}
        return self._pick(self.dims, trained=True)

    @functools.cached_property
    def frozen_dims(self) -> Params:
        model = self._pick(self.dims, trained=False)
        teacher = {name: self.dims[name] for name in self._teacher_parts}
        return _without_empty(model=model, teacher=teacher)

    @functools.cached_property
    def abstract(self) -> Params:
        if self.lora.rank:
            return {ADAPTERS: parameter.abstract(self.adapters, layout=self.definition.layout)}
        return self._pick(self._parts(self.definition.abstract), trained=True)

    @functools.cached_property
    def routers(self) -> RouterLosses | None:
        """Of a model with experts: their losses count beside a teacher's as beside the data's."""
        return None if self.definition.config.moe is None else RouterLosses(self.definition)

    @functools.cached_property
    def adapters(self) -> nnx.Dict:
        """LoRA's factors, declared."""
        layers = self.definition.config.num_layers - self.frozen_layers
        return factors.declare(self.definition, config=self.lora, layers=layers)

    @property
    def side(self) -> bool:
        """Whether the model has a side network, which alone trains."""
        return isinstance(self.definition, SideModel)

    @property
    def without_side(self) -> ModelDef:
        """The model that the side network stands beside; the model itself where there is none."""
        return self.definition.without_side() if self.side else self.definition

    def initial_side(self, *, seed: int) -> Params:
        """The part of the side network: its last projection is zero, so that the model's function
        is unchanged.
        """
        modules = self.definition.modules
        ends = self._initial(modules[SIDE], SIDE, seed)
        blocks = self._initial(modules[LAYERS].side, f"{SIDE}/{LAYERS}", seed)
        return {SIDE: {**ends, LAYERS: blocks}}

    def _initial(self, module: nnx.Module, name: str, seed: int) -> Params:
        initial = parameter.initializer(
            {name: module}, layout=self.definition.layout, config=self.definition.config
        )
        return initial(parameter.root_key(seed))[name]

    def split(self, params: Params, *, teacher: Params | None = None) -> tuple[Params, Params]:
        """(trained, frozen) of all the model's `params`; LoRA's factors are not among them.

        teacher: all of its parameters (default: `params`). No frozen array shares a buffer with a
        trained one, since steps donate the latter.
        """

        def copy_for_teacher(source):
            found = {name: self._parts(source)[name] for name in self._teacher_parts}
            dtype = self.definition.dtype
            cast = lambda a, dims: jnp.copy(a.astype(dtype) if parameter.is_rounded(dims) else a)
            return jax.tree.map(cast, found, self.frozen_dims["teacher"])

        source = params if teacher is None else teacher
        of_teacher = jax.jit(copy_for_teacher)(source) if self._teacher_parts else {}
        of_model = self._parts(params) if self.frozen_layers == 0 else jax.jit(self._parts)(params)
        frozen = _without_empty(model=self._pick(of_model, trained=False), teacher=of_teacher)
        return self._pick(of_model, trained=True), frozen

    @property
    def shares_weights(self) -> bool:
        """Whether the teacher has the weights of the model's frozen parts."""
        return self.teacher is not None and self.distill.teacher == START

    @functools.cached_property
    def dims(self) -> Params:
        """The dimensions of all the model's parts."""
        return part_dims(self.definition, below=self.frozen_layers)

    @functools.cached_property
    def _teacher_parts(self) -> tuple[str, ...]:
        """The parts of which the teacher has its own copy."""
        if self.teacher is None:
            return ()
        if not self.shares_weights:
            return tuple(part_dims(self.teacher, below=self.frozen_layers))
        return () if self.lora.rank or self.side else tuple(self._pick(self.dims, trained=True))

    def _parts(self, params: Params) -> Params:
        """The parts of all the model's `params` (arrays, or their shapes)."""
        return _divided(params, self.frozen_layers, self.definition.config.num_layers)

    def _pick(self, named: Params, *, trained: bool) -> Params:
        frozen = ("embedding", LOWER) if self.frozen_layers else ()
        trains = lambda name: (
            name == SIDE if self.side else not self.lora.rank and name not in frozen
        )
        return {name: part for name, part in named.items() if trains(name) is trained}


def _without_empty(**trees: Params) -> Params:
    return {name: tree for name, tree in trees.items() if tree}


# The parts of a model: its parameters with the lowest layers apart from the others, so that either
# can be frozen. "lower" holds the stacked layers below a number of them, "layers" those from there
# on; an empty stack is left out. All other modules keep their names. A side network is one part,
# "side": its ends, and its blocks, which otherwise stand in the layers, as "layers" in it.


def part_dims(definition: ModelDef, *, below: int) -> Params:
    """The dimensions of every array in the parts."""
    return _divided(definition.dims, below, definition.config.num_layers)


def join_parts(parts: Params) -> Params:
    """The inverse of `RetrainPlan._parts`."""
    stacks = [parts[name] for name in (LOWER, LAYERS) if name in parts]
    joined = jax.tree.map(lambda *layers: jnp.concatenate(layers), *stacks)
    joined = {**{name: part for name, part in parts.items() if name != LOWER}, LAYERS: joined}
    return with_side(joined, joined[SIDE]) if SIDE in joined else joined


def with_side(params: Params, side: Params) -> Params:
    """`params` (or their dimensions), in whose layers there are no blocks, with the part `side`."""
    ends = {name: value for name, value in side.items() if name != LAYERS}
    return {**params, LAYERS: {**params[LAYERS], SIDE: side[LAYERS]}, SIDE: ends}


def _divided(params: Params, below: int, layers: int) -> Params:
    parts = {name: part for name, part in params.items() if name != LAYERS}
    stack = {name: group for name, group in params[LAYERS].items() if name != SIDE}
    if SIDE in parts:
        parts[SIDE] = {**parts[SIDE], LAYERS: params[LAYERS][SIDE]}
    if below == 0:
        return {**parts, LAYERS: stack}
    for name, first, last in ((LOWER, 0, below), (LAYERS, below, layers)):
        if first < last:
            parts[name] = jax.tree.map(lambda a: _sliced(a, first, last), stack)
    return parts


def _sliced(array: Any, first: int, last: int) -> Any:
    """Layers of a stack: an array, its shape, or its dimensions."""
    if isinstance(array, str):
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(shape=(last - first, *array.shape[1:]))
    return array[first:last]
