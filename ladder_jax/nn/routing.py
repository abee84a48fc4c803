"""Routers: which experts each token passes, the statistics of that, and the losses that keep the experts' load even.

All of it is float32. Letters: N tokens, C experts to choose from, K chosen ones, L layers.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.config import MoEConfig, RouterSoftmax
from ladder_jax.parallel import Layout, all_reduce, pvary, rank
from ladder_jax.residual import EXPERTS


class Route(NamedTuple):
    """choice: int32 [N, K], the experts of each token; weights: float32 [N, K], what their outputs count."""

    choice: jax.Array
    weights: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Sums over tokens, of one layer or [L, ...] of all: a state carries them through the layers of a training step.

    counts: [C], how many tokens chose each expert. probabilities: [C], of a softmax over all logits.
    log_squares: [], of that softmax's denominator. entropies: [], of its distribution, in nats.
    dropped: [], how many choices were beyond their experts' capacity.
    """

    counts: jax.Array
    probabilities: jax.Array
    log_squares: jax.Array
    entropies: jax.Array
    dropped: jax.Array

    def with_layer(self, layer: "Routing") -> "Routing":
        """Of all layers, with the newest layer's in the place of the oldest's."""
        return jax.tree.map(lambda all_layers, one: jnp.concatenate([all_layers[1:], one[None]]), self, layer)


def route(logits_NC: jax.Array, *, moe: MoEConfig, bias_C: jax.Array | None = None) -> Route:
    """The experts with the largest logits, or sums of probability and bias; of equal ones that with the lowest index.

    A bias has no gradient: `toward_balance` moves it.
    """
    scores = logits_NC if bias_C is None else jax.nn.softmax(logits_NC, axis=1) + bias_C[None]
    choice = checkpoint_name(lax.stop_gradient(lax.top_k(scores, moe.top_k)[1]), EXPERTS)
    chosen = jnp.take_along_axis(logits_NC, choice, axis=1)
    over = chosen if moe.softmax is RouterSoftmax.CHOSEN else logits_NC
    return Route(choice, jnp.exp(chosen - jax.nn.logsumexp(over, axis=1, keepdims=True)))


def measured(logits_NC: jax.Array, choice_NK: jax.Array) -> Routing:
    """One layer's statistics of these tokens."""
    log_total = jax.nn.logsumexp(logits_NC, axis=1, keepdims=True)
    probabilities = jnp.exp(logits_NC - log_total)
    hits = choice_NK.reshape(-1)[:, None] == jnp.arange(logits_NC.shape[1])[None, :]
    entropies = jnp.sum(log_total) - jnp.sum(probabilities * logits_NC)
    return Routing(
        counts=jnp.sum(hits, axis=0, dtype=jnp.float32),
        probabilities=jnp.sum(probabilities, axis=0),
        log_squares=jnp.sum(jnp.square(log_total)),
        entropies=lax.stop_gradient(entropies),
        dropped=jnp.zeros_like(entropies),
    )


def shapes(moe: MoEConfig, *, num_layers: int) -> dict[str, tuple[int, ...]]:
    """The shapes of all layers' statistics, by name."""
    each = dict(counts=(moe.experts,), probabilities=(moe.experts,), log_squares=(), entropies=(), dropped=())
    return {name: (num_layers, *shape) for name, shape in each.items()}


def zeros(moe: MoEConfig, *, num_layers: int, layout: Layout) -> Routing:
    """All layers' statistics before the first layer, on one rank."""
    make = lambda shape: pvary(jnp.zeros(shape), layout.all_axes)
    return Routing(**{name: make(shape) for name, shape in shapes(moe, num_layers=num_layers).items()})


def of_group(routing: Routing, *, axes: tuple[str, ...], own: bool) -> Routing:
    """Of all tokens of the tensor ranks `axes`, and typed as equal on them.

    own: each rank has measured its own tokens. Otherwise all have measured the same: only the first rank's count, and
    only there is a gradient: that of the router is summed over the ranks.
    """
    return jax.tree.map(lambda a: all_reduce(a if own else jnp.where(rank(axes) == 0, a, 0), axes), routing)


def penalty(
    routing: Routing, *, counts: jax.Array, positions: int, load_balance: float, router_z_loss: float
) -> jax.Array:
    """This part's share of the losses of a batch of `positions` tokens: the mean over layers of

        load_balance C sum_i f_i P_i  +  router_z_loss mean(log(Z)^2)

    (arXiv 2101.03961 and 2202.08906): f_i is the share of all choices in the batch that fell on expert i, `counts`
    [L, C] up to a factor; P_i its mean probability. Evenly loaded experts have C sum_i f_i P_i = 1.
    """
    layers, experts = counts.shape
    shares = counts / jnp.sum(counts, axis=1, keepdims=True)
    uneven = experts * jnp.sum(lax.stop_gradient(shares) * routing.probabilities)
    return (load_balance * uneven + router_z_loss * jnp.sum(routing.log_squares)) / (positions * layers)


def toward_balance(counts_LC: jax.Array, *, choices: int) -> jax.Array:
    """[L, C]: 1 for an expert with less load than the mean, -1 for one with more (arXiv 2408.15664, algorithm 1).

    choices: how many a layer's tokens made. `counts_LC` are the experts' shares of them, up to a factor; they are
    rounded to whole numbers, since ranks and parts add them in another order, and must not change a sign.
    """
    counts = jnp.round(counts_LC * (choices / jnp.sum(counts_LC, axis=1, keepdims=True)))
    return jnp.sign(choices / counts_LC.shape[1] - counts)


def metrics(routing: Routing, *, moe: MoEConfig) -> dict[str, jax.Array]:
    """Of all tokens' sums, up to a factor, in all layers.

    expert_load: the largest load of an expert over the mean of its layer, of the worst layer. dead_experts: how many
    no token chose, in all layers. load_balance and router_z: the losses of `penalty`, without their factors.
    router_entropy: in nats, the mean over layers and tokens. dropped_share: with a capacity, of all choices.
    """
    tokens = jnp.sum(routing.counts, axis=1) / moe.top_k
    shares = routing.counts / (tokens * moe.top_k)[:, None]
    experts = routing.counts.shape[1]
    dropped = {} if moe.capacity is None else {"dropped_share": jnp.sum(routing.dropped) / jnp.sum(routing.counts)}
    return dropped | {
        "expert_load": experts * jnp.max(shares),
        "dead_experts": jnp.sum(routing.counts == 0).astype(jnp.float32),
        "load_balance": experts * jnp.mean(jnp.sum(shares * routing.probabilities, axis=1) / tokens),
        "router_z": jnp.mean(routing.log_squares / tokens),
        "router_entropy": jnp.mean(routing.entropies / tokens),
    }
