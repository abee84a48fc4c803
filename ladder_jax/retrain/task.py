"""What a retraining run trains, on which loss, and from which weights: it takes the place of
`train.Pretraining`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ladder_jax import nn
from ladder_jax.checkpoint import Checkpoint
from ladder_jax.config import START, Json, ModelConfig, RunConfig
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError
from ladder_jax.nn import ModelDef, Params
from ladder_jax.nn.parameter import LAYERS
from ladder_jax.pretrained import OpenedModel
from ladder_jax.pretrained.formats import define
from ladder_jax.processes.agreement import Agreement
from ladder_jax.retrain import conversion, lora, loss, sources
from ladder_jax.retrain.conversion import Terms
from ladder_jax.retrain.plan import ADAPTERS, RetrainPlan, join_parts
from ladder_jax.retrain.sources import Sources


@dataclasses.dataclass(frozen=True)
class Retraining(RetrainPlan):
    """A `train.gradients.TrainingTask` that trains some of the parameters, or learns from more than
    the data.

    sources: where the weights come from.
    """

    sources: Sources = Sources()

    # The program's side: what a compiled step computes.

    @functools.cached_property
    def held_out(self) -> "Retraining":
        return dataclasses.replace(self, teacher=None)

    def scheduled(self, step: jax.Array) -> Terms:
        """{"ladder_fraction": float32 [L]} while layers are converted."""
        if not self.conversion.steps:
            return {}
        topology = self.definition.topology
        fraction = conversion.ladder_fraction(step, topology=topology, config=self.conversion)
        return {conversion.LADDER_FRACTION: fraction}

    def measured(self, terms: Terms, scheduled: Terms) -> Terms:
        of_routers = self.routers.terms if self.routers else {}
        measured = {name: terms[name] for name in terms if name not in of_routers}
        if self.routers:
            measured |= self.routers.metrics({name: terms[name] for name in of_routers})
        if self.conversion.steps:
            measured["turned"] = jnp.mean(scheduled[conversion.LADDER_FRACTION])
        return measured

    loss_sum = loss.loss_sum

    # The host's side: from checkpoints to parameters, and back.

    @property
    def origin(self) -> str | None:
        start = self.sources.start
        return start and f"starting from {sources.exact_name(start)}, {start.config.model.residual}"

    @property
    def sources_record(self) -> Json:
        return self.sources.record()

    def initial(self, *, seed: int) -> tuple[Params, Params]:
        start = self.sources.start
        params = self._stored(start) if start else nn.initialize(self.definition, seed=seed)
        trained, frozen = self.split(params, teacher=self._teacher_params())
        if self.side and not trained:
            trained = self.initial_side(seed=seed)
        if self.lora.rank:
            trained = {ADAPTERS: self._initial(self.adapters, ADAPTERS, seed)}
        return trained, frozen

    def restored(self, checkpoint: Checkpoint, *, extra: Params) -> tuple[Params, Params]:
        # A checkpoint of LoRA holds the merged matrices, which are rounded; the factors belong to
        # those of the start.
        if self.lora.rank:
            params = self.sources.start.params(self.definition, dtype=np.float32)
        else:
            params = checkpoint.params(self.definition)
        trained, frozen = self.split(params, teacher=self._teacher_params())
        return (extra if self.lora.rank else trained), frozen

    def extra(self, trained: Params) -> Params:
        return dict(trained) if self.lora.rank else {}

    @functools.cached_property
    def exported(self):
        """A (trained, frozen) -> all the model's parameters, compiled: laid out over the mesh as
        the model is.
        """
        if self.frozen_layers == 0 and not self.lora.rank and not self.side:
            return lambda trained, frozen: trained
        shardings = jax.tree.map(lambda a: a.sharding, self.definition.abstract)
        join = jax.jit(self._join, out_shardings=shardings)
        return lambda trained, frozen: join(trained, frozen["model"])

    def _teacher_params(self) -> Params | None:
        return self.teacher and self._stored(self.sources.teacher)

    def _stored(self, model: OpenedModel) -> Params:
        """A source's parameters, which may be those of a model without a side network."""
        definition = self.without_side if model.config.model.side is None else self.definition
        return model.params(definition, dtype=np.float32)

    def _join(self, trained: Params, frozen: Params) -> Params:
        joined = {**frozen, **trained}
        if self.lora.rank:
            factors = joined.pop(ADAPTERS)
            dims = self.dims[LAYERS]
            joined[LAYERS] = lora.merge(joined[LAYERS], factors, dims=dims, scale=self.lora.scale)
        return join_parts(joined)


def of_run(
    config: RunConfig,
    *,
    mesh: Mesh,
    recorded: Json | None,
    agreement: Agreement,
    tokenizer: Tokenizer,
) -> Retraining:
    """The task of a run, its checkpoints opened; `recorded`: the sources in the checkpoint it
    resumes, None if none. tokenizer: of the data.

    All processes take what process 0 does: the newest checkpoint of a folder may be another one
    here. Raises UserError for a missing or unfit checkpoint.
    """
    decide = lambda: sources.of_run(config, recorded=recorded).record()
    decided = agreement.broadcast("where weights come from", decide)
    with agreement.together("where weights come from"):
        found = sources.of_run(config, recorded=recorded, decided=decided, tokenizer=tokenizer)
    definition = define(config.model, mesh=mesh, experts=config.mesh.experts)
    return of_sources(
        config, definition=definition, teacher=sources.teacher_model(config, found), sources=found
    )


def of_sources(
    config: RunConfig, *, definition: ModelDef, teacher: ModelConfig | None, sources: Sources
) -> Retraining:
    """The task that `config` describes. Raises UserError for a teacher that cannot teach this
    model.
    """
    of_teacher = None
    if teacher is not None:
        ranks = definition.layout.ranks
        if teacher.ranks not in (None, ranks):
            raise UserError(
                f"distill.teacher={config.distill.teacher!r}: a {teacher.residual} teacher of model.ranks="
                f"{teacher.ranks} is another function on {ranks} ranks (allowed: mesh.tensor={teacher.ranks};"
                " or distill.residual=standard, its weights as a standard model)"
            )
        of_teacher = ModelDef(teacher, definition.layout)
        if config.distill.teacher == START and of_teacher.topology == definition.topology:
            raise UserError(
                f"the teacher would be the model itself: its weights, and {teacher.residual};"
                " the original is distill.residual=standard, or of refitted weights distill.teacher=PATH"
            )
    return Retraining(
        definition,
        config.train.freeze,
        config.lora,
        config.distill,
        config.conversion,
        of_teacher,
        sources,
    )
