"""The losses and metrics of a model's routers in training: those of the whole batch, however it is split.

The load of the experts in the Switch loss is that of all positions of the batch, on all ranks. With `accumulate` a
forward pass over all parts finds it before the first gradient, so that the parts do not change the loss.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax.config import TrainConfig
from ladder_jax.nn import forward, routing
from ladder_jax.nn.model_def import ModelDef, Params
from ladder_jax.nn.parameter import LAYERS, stacks
from ladder_jax.nn.positions import FullSequence, Packed
from ladder_jax.nn.routing import Routing
from ladder_jax.parallel import all_reduce, pvary, varying
from ladder_jax.parallel.collectives import LOSS

PREDICTED, COUNTS = "predicted", "expert_counts"
"""What `loss_sum` is given of the whole batch: its predicted positions, [], and the experts' load, [L, C]."""


@dataclasses.dataclass(frozen=True)
class RouterLosses:
    """Of one model; all methods but `metrics` and `balanced` run on one rank."""

    definition: ModelDef

    @property
    def terms(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the statistics, which are the loss's terms."""
        return routing.shapes(self.definition.config.moe, num_layers=self._num_layers)

    @property
    def _num_layers(self) -> int:
        """How many layers have experts."""
        return len(stacks(self.definition.config)[LAYERS])

    def metrics(self, terms: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return routing.metrics(Routing(**terms), moe=self.definition.config.moe)

    def balanced(self, params: Params, terms: dict[str, jax.Array], *, config: TrainConfig) -> Params:
        """`params` after a step, with the biases of the routers that train moved against the batch's load."""
        moe, layers = self.definition.config.moe, params.get("layers")  # low-rank factors train without them
        if not (moe.router_bias and config.router_bias_rate and layers):
            return params
        bias, choices = layers["mlp"]["router_bias"], config.batch * config.sequence * moe.top_k
        signs = routing.toward_balance(terms["counts"][-len(bias) :], choices=choices)  # the lowest may be frozen
        mlp = {**layers["mlp"], "router_bias": bias + config.router_bias_rate * signs}
        return {**params, "layers": {**layers, "mlp": mlp}}

    def measures(self, scheduled: dict[str, jax.Array]) -> bool:
        """Whether the step counts the routers' losses; a held-out loss does not."""
        return PREDICTED in scheduled

    def scheduled(
        self, terms: Callable[[Any, dict], dict], batch: Any, *, predicted: int | jax.Array, config: TrainConfig
    ) -> dict[str, jax.Array]:
        """What `loss_sum` is given of the whole batch. terms: those of a part, from it and what this returns."""
        given = {PREDICTED: jnp.asarray(predicted, jnp.float32)}
        if config.accumulate == 1 or not config.load_balance:
            return given
        parts = jax.tree.map(lambda a: a.reshape(config.accumulate, -1, *a.shape[1:]), batch)
        zeros = pvary(jnp.zeros(self.terms["counts"]), varying(jax.tree.leaves(batch)[0]))
        add = lambda counts, part: (counts + terms(part, given)["counts"], None)
        counts = lax.scan(add, zeros, parts)[0]
        with jax.named_scope(LOSS):
            return {**given, COUNTS: all_reduce(counts, self.definition.layout.batch)}

    def loss_sum(
        self, params: Params, batch: Any, *, scheduled: dict[str, jax.Array], config: TrainConfig
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(the loss of a part of the batch's rows, its `terms`). Divided by the batch's predicted positions and summed
        over parts, the loss is the mean cross-entropy plus the routers' losses of the batch.

        batch: tokens, targets and weights [B, T], and segments [B, T] or None, as `data.batch.Targets` has them.
        """
        definition = self.definition
        positions = FullSequence() if batch.segments is None else Packed(batch.segments)
        settings = dict(execution=config.execution, positions=positions)
        run = forward.ForwardPass(definition, batch.tokens.shape, **settings)
        state, _ = run.embed(params, batch.tokens)
        state, chosen, _ = run.layers(state, self.begin(), params=params)
        x = run.finish(params, state)
        settings = dict(weights=batch.weights, z_loss=config.z_loss, chunk=config.loss_chunk)
        loss = forward.loss_sum(definition, params, x, batch.targets, **settings)
        penalty, terms = self.penalty(chosen, batch, scheduled=scheduled, config=config)
        return loss + penalty, terms

    def begin(self) -> Routing:
        """The `extra` of a forward pass whose layers' routers are to be measured."""
        definition = self.definition
        return routing.zeros(definition.config.moe, num_layers=self._num_layers, layout=definition.layout)

    def penalty(
        self, chosen: Routing, batch: Any, *, scheduled: dict[str, jax.Array], config: TrainConfig
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(the routers' losses, the `terms`) of a forward pass's `extra`; the rest as in `loss_sum`."""
        layout = self.definition.layout
        with jax.named_scope(LOSS):
            own = self.definition.exchanges(config.execution)
            chosen = routing.of_group(chosen, axes=layout.tensor, own=own)
            counts = scheduled.get(COUNTS)
            penalty = routing.penalty(
                chosen,
                counts=all_reduce(lax.stop_gradient(chosen.counts), layout.batch) if counts is None else counts,
                positions=batch.tokens.size * config.accumulate * layout.batch_ranks,
                load_balance=config.load_balance,
                router_z_loss=config.router_z_loss,
            )
            return penalty * scheduled[PREDICTED], lax.stop_gradient(vars(chosen))
