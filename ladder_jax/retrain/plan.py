"""What of a model trains, what stays as it is, and what it learns from: a value that compiled steps are made of."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ladder_jax.config import START, ConversionConfig, DistillConfig, LoraConfig, RunConfig
from ladder_jax.errors import UserError
from ladder_jax.nn import ModelDef, Params, parameter
from ladder_jax.retrain import lora as factors
from ladder_jax.retrain import parts

ADAPTERS = "adapters"
"""The part of what trains that holds low-rank factors."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fixed:
    """What steps read and never change, in parts (see parts.py): no gradient, no moments.

    frozen: those of the model that do not train. teacher: those of the teacher that are not the model's frozen ones,
    its matrices in the compute dtype.
    """

    frozen: Params = dataclasses.field(default_factory=dict)
    teacher: Params = dataclasses.field(default_factory=dict)


NOTHING = Fixed()


@dataclasses.dataclass(frozen=True)
class Plan:
    """How `definition`'s model trains. frozen_layers: the lowest, and with them the embedding.

    teacher: its definition, over the same layout. Its weights are those that training starts from if distill.teacher
    is `start`: then what the model freezes is the teacher's, too.
    """

    definition: ModelDef
    frozen_layers: int = 0
    lora: LoraConfig = LoraConfig()
    distill: DistillConfig = DistillConfig()
    conversion: ConversionConfig = ConversionConfig()
    teacher: ModelDef | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every weight trains, on the data alone."""
        return not (self.frozen_layers or self.lora.rank or self.teacher or self.conversion.steps)

    @functools.cached_property
    def trained_dims(self) -> Params:
        """The dimensions of what trains, such as {"embedding": {"table": "VD"}, ...}."""
        return {ADAPTERS: parameter.dims_of(self.adapters)} if self.lora.rank else self._pick(self._dims, trains=True)

    @functools.cached_property
    def fixed_dims(self) -> Fixed:
        return Fixed(self._pick(self._dims, trains=False), {name: self._dims[name] for name in self._of_teacher})

    @functools.cached_property
    def abstract(self) -> Params:
        """Shape, dtype and sharding of what trains."""
        if self.lora.rank:
            return {ADAPTERS: parameter.abstract(self.adapters, layout=self.definition.layout)}
        return self._pick(self._cut(self.definition.abstract), trains=True)

    @functools.cached_property
    def adapters(self) -> factors.Group:
        """The low-rank factors, declared."""
        layers = self.definition.config.num_layers - self.frozen_layers
        return factors.declare(self.definition, config=self.lora, layers=layers)

    def initial_adapters(self, *, seed: int) -> Params:
        layout, vocabulary = self.definition.layout, self.definition.config.vocab_size
        settings = dict(name=ADAPTERS, layout=layout, key=parameter.root_key(seed), vocab_size=vocabulary)
        return {ADAPTERS: parameter.initial_values(self.adapters, **settings)}

    def split(self, params: Params, *, teacher: Params | None = None) -> tuple[Params, Fixed]:
        """(what trains, what is fixed) of all the model's `params`, which low-rank factors are not part of.

        teacher: all of its parameters; without, they are `params`. Nothing that is fixed lies in a buffer that trains.
        """

        def of_teacher(source):
            found = {name: self._cut(source)[name] for name in self._of_teacher}
            dtype = jnp.dtype(self.definition.config.dtype.value)
            cast = lambda a, dims: jnp.copy(a.astype(dtype) if parameter.is_matrix(dims) else a)
            return jax.tree.map(cast, found, self.fixed_dims.teacher)

        source = params if teacher is None else teacher
        taught = jax.jit(of_teacher)(source) if self._of_teacher else {}
        found = params if self.frozen_layers == 0 else jax.jit(self._cut)(params)
        return self._pick(found, trains=True), Fixed(self._pick(found, trains=False), taught)

    def joined(self, trained: Params, frozen: Params) -> Params:
        """All the model's parameters, low-rank factors merged: what a checkpoint holds."""
        found = {**frozen, **trained}
        if self.lora.rank:
            beside, dims = found.pop(ADAPTERS), self._dims[parts.LAYERS]
            found[parts.LAYERS] = factors.merged(found[parts.LAYERS], beside, dims=dims, scale=self.lora.scale)
        return parts.join(found)

    @functools.cached_property
    def exported(self):
        """`joined`, compiled: on the devices, laid out as the model is. What trains is all there is in a plain plan."""
        if self.frozen_layers == 0 and not self.lora.rank:
            return lambda trained, frozen: trained
        return jax.jit(self.joined, out_shardings=jax.tree.map(lambda a: a.sharding, self.definition.abstract))

    @property
    def shares_weights(self) -> bool:
        """Whether the teacher's weights are those that the model's frozen parts have."""
        return self.teacher is not None and self.distill.teacher == START

    @functools.cached_property
    def _of_teacher(self) -> tuple[str, ...]:
        """The parts that the teacher holds for itself."""
        if self.teacher is None:
            return ()
        if not self.shares_weights:
            return tuple(self._dims)
        return () if self.lora.rank else tuple(self._pick(self._dims, trains=True))

    @functools.cached_property
    def _dims(self) -> Params:
        return parts.cut_dims(self.definition, below=self.frozen_layers)

    def _cut(self, params: Params) -> Params:
        return parts.cut(params, below=self.frozen_layers, layers=self.definition.config.num_layers)

    def _pick(self, found: Params, *, trains: bool) -> Params:
        frozen = ("embedding", parts.LOWER) if self.frozen_layers else ()
        return {name: part for name, part in found.items() if (not self.lora.rank and name not in frozen) is trains}


def of_run(config: RunConfig, *, definition: ModelDef, teacher: Any = None) -> Plan:
    """The plan of a run; `teacher` is its ModelConfig. Raises UserError for one that cannot teach this model."""
    if teacher is not None:
        teacher = ModelDef(teacher, definition.layout)
        if teacher.dims != definition.dims:
            raise UserError(
                f"a {teacher.config.residual} teacher has other parameters than a {definition.config.residual} model"
            )
        if config.distill.teacher == START and teacher.topology == definition.topology:
            raise UserError(
                f"the teacher would be the model itself: its weights, and {teacher.config.residual};"
                " distill.residual=standard is the original"
            )
    return Plan(definition, config.train.freeze, config.lora, config.distill, config.conversion, teacher)
