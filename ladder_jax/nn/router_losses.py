"""The losses and metrics of a model's routers in training: those of the whole batch, however it is
split.

The load of the experts in the Switch loss is that of all positions of the batch, on all ranks. With
`accumulate` a forward pass over all parts finds it before the first gradient, so that the parts do
not change the loss.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ladder_jax.config import TrainConfig
from ladder_jax.nn.experts import Routing
from ladder_jax.nn.model_def import ModelDef, Params
from ladder_jax.nn.parameter import LAYERS, stacks
from ladder_jax.parallel import all_reduce, pvary, rank
from ladder_jax.scopes import LOSS

PREDICTED = "predicted"
COUNTS = "expert_counts"
"""What a step's loss is given of the whole batch: its predicted positions, [], and the experts'
load, [L, C].
"""


@dataclasses.dataclass(frozen=True)
class RouterLosses:
    """Of one model; all methods but `metrics` and `balanced` run on one rank."""

    definition: ModelDef

    @property
    def terms(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the statistics, which are the loss's terms."""
        config = self.definition.config
        layers = len(stacks(config)[LAYERS])
        of_expert = dict.fromkeys(("counts", "probabilities"), (layers, config.moe.experts))
        return of_expert | dict.fromkeys(("log_squares", "entropies", "dropped"), (layers,))

    def metrics(self, terms: dict[str, Array]) -> dict[str, Array]:
        """Of all tokens' sums, up to a factor, in all layers.

        expert_load: the largest load of an expert over the mean of its layer, of the worst layer.
        dead_experts: how many no token chose, in all layers. load_balance and router_z: the losses
        of `penalty`, without their factors.
        router_entropy: in nats, the mean over layers and tokens. dropped_share: with a capacity, of
            all choices.
        """
        routing = Routing(**terms)
        moe = self.definition.config.moe
        tokens = jnp.sum(routing.counts, axis=1) / moe.top_k
        shares = routing.counts / (tokens * moe.top_k)[:, None]
        found = {}
        if moe.capacity is not None:
            found["dropped_share"] = jnp.sum(routing.dropped) / jnp.sum(routing.counts)
        found["expert_load"] = moe.experts * jnp.max(shares)
        found["dead_experts"] = jnp.sum(routing.counts == 0).astype(jnp.float32)
        uneven = jnp.sum(shares * routing.probabilities, axis=1) / tokens
        found["load_balance"] = moe.experts * jnp.mean(uneven)
        found["router_z"] = jnp.mean(routing.log_squares / tokens)
        found["router_entropy"] = jnp.mean(routing.entropies / tokens)
        return found

    def balanced(self, params: Params, terms: dict[str, Array], *, config: TrainConfig) -> Params:
        """`params` after a step, with the biases of the routers that train moved against the
        batch's load.
        """
        # low-rank factors train without them
        moe = self.definition.config.moe
        layers = params.get("layers")
        if not (moe.router_bias and config.router_bias_rate and layers):
            return params
        bias = layers["mlp"]["router_bias"]
        choices = config.batch * config.sequence * moe.top_k
        # the lowest may be frozen
        signs = toward_balance(terms["counts"][-len(bias) :], choices=float(choices))
        mlp = {**layers["mlp"], "router_bias": bias + config.router_bias_rate * signs}
        return {**params, "layers": {**layers, "mlp": mlp}}

    def measures(self, scheduled: dict[str, Array]) -> bool:
        """Whether the step counts the routers' losses; a held-out loss does not."""
        return PREDICTED in scheduled

    def scheduled(
        self,
        terms: Callable[[Any, dict], dict],
        batch: Any,
        *,
        predicted: int | Array,
        config: TrainConfig,
    ) -> dict[str, Array]:
        """What a step's loss is given of the whole batch. terms: those of a part, from it and what
        this returns.
        """
        given = {PREDICTED: jnp.asarray(predicted, jnp.float32)}
        if config.accumulate == 1 or not config.load_balance:
            return given

        def split(a):
            return a.reshape(config.accumulate, -1, *a.shape[1:])

        def add(counts, part):
            return (counts + terms(part, given)["counts"], None)

        parts = jax.tree.map(split, batch)
        rows, *_ = jax.tree.leaves(batch)
        zeros = jnp.zeros_like(rows, jnp.float32, self.terms["counts"])
        counts, _ = lax.scan(add, zeros, parts)
        with jax.named_scope(LOSS):
            return {**given, COUNTS: all_reduce(counts, self.definition.layout.batch)}

    def begin(self) -> Routing:
        """The `extra` of a forward pass whose layers' routers are to be measured."""
        axes = self.definition.layout.all_axes
        zeros = {
            name: pvary(jnp.zeros(shape, jnp.float32), axes) for name, shape in self.terms.items()
        }
        return Routing(**zeros)

    def penalty(
        self, chosen: Routing, batch: Any, *, scheduled: dict[str, Array], config: TrainConfig
    ) -> tuple[Array, dict[str, Array]]:
        """(the routers' losses, the `terms`) of a forward pass's `extra`: this part's share of the
        batch's losses

            load_balance C sum_i f_i P_i  +  router_z_loss mean(log(Z)^2)

        times its predicted positions, the mean over layers (arXiv 2101.03961 and 2202.08906). f_i
        is the share of all choices in the batch that fell on expert i, P_i its mean probability.
        Evenly loaded experts have
        C sum_i f_i P_i = 1.
        """
        layout = self.definition.layout
        is_own = self.definition.exchanges(config.execution)

        def of_group(a):
            # Where all tensor ranks have measured the same tokens, only the first rank's count, and
            # only there is a gradient: that of the router is summed over the ranks.
            mine = a if is_own else jnp.where(rank(layout.tensor) == 0, a, 0)
            return all_reduce(mine, layout.tensor)

        with jax.named_scope(LOSS):
            chosen = jax.tree.map(of_group, chosen)
            counts = scheduled.get(COUNTS)
            if counts is None:
                counts = all_reduce(lax.stop_gradient(chosen.counts), layout.batch)
            layers, experts = counts.shape
            shares = counts / jnp.sum(counts, axis=1, keepdims=True)
            uneven = experts * jnp.sum(lax.stop_gradient(shares) * chosen.probabilities)
            losses = config.load_balance * uneven + config.router_z_loss * jnp.sum(
                chosen.log_squares
            )
            tokens = batch.tokens.size * config.accumulate * layout.batch_ranks
            mean = losses / float(tokens * layers)  # may be no int32
            return mean * scheduled[PREDICTED], lax.stop_gradient(vars(chosen))


def toward_balance(counts_LC: Array, *, choices: float) -> Array:
    """[L, C]: 1 for an expert with less load than the mean, -1 for one with more (arXiv 2408.15664,
    algorithm 1).

    choices: how many a layer's tokens made. `counts_LC` are the experts' shares of them, up to a
    factor; they are rounded to whole numbers, since ranks and parts add them in another order, and
    must not change a sign.
    """
    counts = jnp.round(counts_LC * (choices / jnp.sum(counts_LC, axis=1, keepdims=True)))
    return jnp.sign(choices / counts_LC.shape[1] - counts)
