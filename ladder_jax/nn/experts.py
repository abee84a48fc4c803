"""A mixture of experts in the place of a layer's MLP, its experts split over the tensor-parallel
ranks.

    route    each token's experts and their weights, from float32 logits
    sort     the N x K (token, choice) rows by expert; those of other ranks' experts come last
    compute  gate, up and down of this rank's experts, each one matmul over groups of rows
             (`lax.ragged_dot`)
    combine  each token's rows, weighted and summed in float32: this rank's partial sum

Ranks read the same input and so choose the same experts, without communication; their partial sums
are reduced as an MLP's are. No token is dropped (but in training with `capacity`), and a token's
output does not depend on the others. Letters: N tokens, K choices of one, R = N K rows, E this
rank's experts, M the width of one, W of the shared expert.

In the other form (`NormedExperts`, residual/wires/exchange.py) ranks exchange the rows of their own
tokens. All experts' buffers have one size there, so their matmuls are plain batched ones, which
every compiler has kernels for.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ladder_jax import residual
from ladder_jax.config import ModelConfig, RouterSoftmax
from ladder_jax.nn import quantized
from ladder_jax.nn.grouped import Groups, grouped_matmul
from ladder_jax.nn.parameter import Module, Sizes, residual_writer, sizes_of, zeros
from ladder_jax.nn.quantized import Int8
from ladder_jax.parallel import exchange, pvary, rank, ranks, varying
from ladder_jax.parallel.collectives import Axes
from ladder_jax.residual import EXPERTS, Normed
from ladder_jax.residual.recurrence import Project, local

CHUNK = 8192  # tokens whose rows are in memory at once
NO_EXPERT = jnp.iinfo(jnp.int32).max  # in place of a row's choice


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Sums over tokens, of one layer or [L, ...] of all: a state carries them through the layers of
    a training step.

    counts: [C], how many tokens chose each expert. probabilities: [C], of a softmax over all
        logits.
    log_squares: [], of that softmax's denominator. entropies: [], of its distribution, in nats.
    dropped: [], how many choices were beyond their experts' capacity.
    """

    counts: Array
    probabilities: Array
    log_squares: Array
    entropies: Array
    dropped: Array

    def with_layer(self, layer: "Routing") -> "Routing":
        """Of all layers, with the newest layer's in the place of the oldest's."""

        def append(of_all, newest):
            return jnp.concatenate([of_all[1:], newest[None]])

        return jax.tree.map(append, self, layer)


OnRouting = Callable[[Routing], None]


def measured(logits_NC: Array, choice_NK: Array, *, kept_NK: Array | None) -> Routing:
    """One layer's statistics of these tokens. kept: which choices are within their experts'
    capacity; None: all.
    """
    log_total = jax.nn.logsumexp(logits_NC, axis=1, keepdims=True)
    probabilities = jnp.exp(logits_NC - log_total)
    hits = choice_NK.reshape(-1)[:, None] == jnp.arange(logits_NC.shape[1])[None, :]
    entropies = jnp.sum(log_total) - jnp.sum(probabilities * logits_NC)
    dropped = jnp.zeros_like(entropies)
    if kept_NK is not None:
        dropped = jnp.sum(~kept_NK, dtype=jnp.float32)
    return Routing(
        counts=jnp.sum(hits, axis=0, dtype=jnp.float32),
        probabilities=jnp.sum(probabilities, axis=0),
        log_squares=jnp.sum(jnp.square(log_total)),
        entropies=lax.stop_gradient(entropies),
        dropped=dropped,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormedExperts(Normed):
    """Experts behind their norm, and the parts of them between which ranks exchange rows
    (residual/wires/exchange.py).

    on_routing: called with the statistics of this rank's tokens. ends_B: where the rows of all
        ranks end; padding takes no slot.

    route: a normalised input, this rank's positions [B, T, D], to (its tokens with the norm's gain
        [N, D], their slots int32 [N, K] as `parallel.exchange.slots`, the weights of their rows
        float32 [N, K]).
    compute: the rows [E/ranks, R, D] of this rank's experts to their outputs [R, E/ranks, D], the
        order in which they are sent.
    shared: the shared expert's partial sum [B, T, D] of a normalised input. In both `into` computes
        the first products.
    """

    moe: "MoE"
    axes: Axes
    on_routing: OnRouting | None
    ends_B: Array | None
    projects: bool = False

    def route(self, x_BTD: Array) -> tuple[Array, Array, Array]:
        with jax.named_scope("mlp"):  # though it is part of attention's step
            x_BTD = self.gained(x_BTD)
            x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
            logits = self.moe.logits(x_ND)
            experts = self.moe.experts.count * ranks(self.axes)
            size = self.moe.moe.slots(len(x_ND))
            choice, weights = self.moe.route(logits)
            taken = choice
            if self.ends_B is not None:
                length = x_BTD.shape[1]
                positions = (rank(self.axes) * length + jnp.arange(length))[None, :]
                is_token = positions < self.ends_B[:, None]
                taken = jnp.where(is_token.reshape(-1, 1), choice, experts)
            slots = exchange.slots(taken, experts=experts, size=size)
            if self.on_routing:
                self.on_routing(measured(logits, choice, kept_NK=slots < experts * size))
            return x_ND, slots, weights

    def compute(self, rows_ERD: Array, *, into: Project) -> Array:
        """[R, E, D]: so the matmul writes what is sent in the order of sending, and no copy
        follows.
        """
        experts = self.moe.experts
        matrices = experts.gate.get_value(), experts.up.get_value()
        gate, up = into(_batched_matmuls, rows_ERD, matrices)
        return quantized.einsum("ERM,EMD->RED", jax.nn.silu(gate) * up, experts.down.get_value())

    def shared(self, x_BTD: Array, *, into: Project = local) -> Array:
        return self.moe.shared(self.gained(x_BTD), into=into)


class ExpertMLPs(Module):
    """The SwiGLU matrices of all experts, [E, D, M], [E, D, M] and [E, M, D]; padding experts are
    never chosen.
    """

    def __init__(self, sizes: Sizes):
        new = sizes.declare
        self.gate = new("EDM")
        self.up = new("EDM")
        self.down = new("EMD", init=residual_writer(sizes.config))

    def __call__(self, x_ND: Array, choice_NK: Array, weights_NK: Array, *, axes: Axes) -> Array:
        """This rank's partial sum [N, D] of the chosen experts' weighted outputs."""
        index = choice_NK - rank(axes) * self.count  # among this rank's experts
        is_mine = (index >= 0) & (index < self.count)
        group = jnp.where(is_mine, index, self.count).reshape(-1)
        groups = Groups(*exchange.by_expert(group, experts=self.count))
        rows = _sorted_rows(pvary(x_ND, varying(groups.order)), groups, choice_NK.shape[1])
        gate = grouped_matmul(rows, self.gate.get_value(), groups)
        up = grouped_matmul(rows, self.up.get_value(), groups)
        down = grouped_matmul(jax.nn.silu(gate) * up, self.down.get_value(), groups)
        out = _in_token_order(down, groups)
        # the other rows are undefined
        of_tokens = jnp.where(is_mine[:, :, None], out.reshape(*is_mine.shape, out.shape[1]), 0)
        weighed = of_tokens.astype(jnp.float32) * weights_NK[:, :, None]
        return jnp.sum(weighed, axis=1).astype(x_ND.dtype)

    @property
    def count(self) -> int:
        """How many experts this rank holds."""
        return self.down.get_value().shape[0]


class SharedExpert(Module):
    """The MLP that every token passes; with `shared_gate` its output counts sigmoid(x . share)
    times.
    """

    def __init__(self, sizes: Sizes):
        new = sizes.declare
        self.gate = new("DW")
        self.up = new("DW")
        self.down = new("WD", init=residual_writer(sizes.config))
        if sizes.config.moe.shared_gate:
            self.share = new("D")

    def __call__(self, x_BTD: Array, *, into: Project = local) -> Array:
        """A rank's partial sum [B, T, D]. into: computes the first products."""
        matrices = self.gate.get_value(), self.up.get_value()
        gate, up = into(quantized.GATE_UP, x_BTD, matrices)
        out = quantized.einsum("BTW,WD->BTD", jax.nn.silu(gate) * up, self.down.get_value())
        if not hasattr(self, "share"):
            return out
        weighed = x_BTD.astype(jnp.float32) * self.share[...][None, None]
        share = jnp.sum(weighed, axis=-1, keepdims=True)
        return (out.astype(jnp.float32) * jax.nn.sigmoid(share)).astype(out.dtype)


class MoE(Module):
    """`MoE(config, rngs=nnx.Rngs(0))(x)` is the whole sublayer on one device; inside
    `jax.shard_map`, over a rank's shards of its arrays and with the `axes` of its ranks, this
    rank's partial sum.
    """

    def __init__(self, config: ModelConfig | Sizes, *, rngs: nnx.Rngs | None = None):
        sizes = sizes_of(config, rngs)
        self.config = sizes.config
        self.moe = sizes.config.moe
        self.router = sizes.declare("DC")
        if self.moe.router_bias:
            self.router_bias = sizes.declare("C", init=zeros)
        self.experts = ExpertMLPs(sizes)
        if self.moe.shared_width:
            self.shared = SharedExpert(sizes)

    def __call__(
        self, x_BTD: Array, *, axes: Axes = (), on_routing: OnRouting | None = None
    ) -> Array:
        """A rank's partial sum [B, T, D] of routed and shared experts. on_routing: as in
        `routed`.
        """
        out = self.routed(x_BTD, axes=axes, on_routing=on_routing)
        return out + self.shared(x_BTD) if hasattr(self, "shared") else out

    def routed(self, x_BTD: Array, *, axes: Axes, on_routing: OnRouting | None = None) -> Array:
        """A rank's partial sum [B, T, D] of routed experts. on_routing: called with the statistics
        of all tokens.
        """
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        logits = self.logits(x_ND)
        choice, weights = self.route(logits)
        if on_routing:
            kept = None
            if self.moe.capacity is not None:
                experts = self.moe.experts
                size = self.moe.slots(len(x_ND))
                kept = exchange.slots(choice, experts=experts, size=size) < experts * size
            on_routing(measured(logits, choice, kept_NK=kept))
            if kept is not None:  # the others choose no expert
                choice = jnp.where(kept, choice, NO_EXPERT)
        compute = functools.partial(self.experts, axes=axes)
        if len(x_ND) > CHUNK:
            compute = functools.partial(_in_chunks, compute)
        return compute(x_ND, choice, weights).reshape(x_BTD.shape)

    def sublayers(self, norm: Any, *, context: Any, on_routing: OnRouting | None) -> list[Normed]:
        """A layer's second sublayer behind its norm; of FarSkip two, routed and shared experts.

        context: a `LayerContext`.
        """
        axes = context.axes
        behind = norm, context.dtype, norm.scale[...]
        is_farskip = residual.of_model(self.config).farskip
        routed = self.routed if is_farskip else self
        experts = NormedExperts(
            functools.partial(routed, axes=axes, on_routing=on_routing),
            *behind,
            moe=self,
            axes=axes,
            on_routing=on_routing,
            ends_B=context.positions.ends,
        )
        return [experts, Normed(self.shared, *behind)] if is_farskip else [experts]

    def logits(self, x_ND: Array) -> Array:
        """Float32 [N, C], of float32 products: a TPU would round their operands to bfloat16."""
        wide = x_ND.astype(jnp.float32)
        return jnp.einsum("ND,DC->NC", wide, self.router[...], precision=lax.Precision.HIGHEST)

    def route(self, logits_NC: Array) -> tuple[Array, Array]:
        """(the experts of each token, int32 [N, K]; what their outputs count, float32 [N, K]).

        Those with the largest logits, or sums of probability and bias; of equal ones that with the
        lowest index.

        A bias has no gradient: `toward_balance` moves it.
        """
        scores = logits_NC
        if self.moe.router_bias:
            scores = jax.nn.softmax(logits_NC, axis=1) + self.router_bias[...][None]
        _, choice = lax.top_k(scores, self.moe.top_k)
        choice = checkpoint_name(lax.stop_gradient(choice), EXPERTS)
        chosen = jnp.take_along_axis(logits_NC, choice, axis=1)
        over = chosen if self.moe.softmax is RouterSoftmax.CHOSEN else logits_NC
        total = jax.nn.logsumexp(over, axis=1, keepdims=True)
        return choice, jnp.exp(chosen - total)


def _in_chunks(compute, x_ND, choice_NK, weights_NK):
    """`compute` of CHUNK tokens at a time, whose rows are computed again backward. Padding chooses
    no expert.
    """
    count = -(-len(x_ND) // CHUNK)
    missing = count * CHUNK - len(x_ND)

    def chunks(array, fill=0):
        padding = jnp.full((missing, array.shape[1]), fill, array.dtype)
        return jnp.concatenate([array, padding]).reshape(count, CHUNK, array.shape[1])

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_chunk(part):
        return compute(*part)

    parts = chunks(x_ND), chunks(choice_NK, NO_EXPERT), chunks(weights_NK)
    out = lax.map(of_chunk, parts).reshape(count * CHUNK, -1)
    return out[: len(x_ND)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sorted_rows(x_ND, groups, choices):
    """[R, D]: for each sorted row its token. Backward a token's rows are added in float32."""
    return jnp.take(x_ND, groups.order // choices, axis=0, mode="clip")


def _sorted_rows_backward(choices, residuals, gradient):
    groups, like = residuals
    gradient = jnp.take(gradient, groups.place, axis=0, mode="clip")
    of_tokens = gradient.reshape(-1, choices, gradient.shape[1])
    summed = jnp.sum(of_tokens, axis=1, dtype=jnp.float32)
    return summed.astype(like.dtype), None


_sorted_rows.defvjp(
    lambda x, groups, choices: (
        _sorted_rows.__wrapped__(x, groups, choices),
        (groups, jnp.zeros((), x.dtype)),
    ),
    _sorted_rows_backward,
)


@jax.custom_vjp
def _in_token_order(rows_RD, groups):
    """The sorted rows, back in the order of tokens and choices."""
    return jnp.take(rows_RD, groups.place, axis=0, mode="clip")


_in_token_order.defvjp(
    lambda rows, groups: (_in_token_order.__wrapped__(rows, groups), groups),
    lambda groups, gradient: (jnp.take(gradient, groups.order, axis=0, mode="clip"), None),
)


def _batched_matmuls(rows_ERI, weights):
    """[E, R, O] of each of `weights` [E, I, O]: the rows of each expert times its matrix."""
    products = []
    for weight in weights:
        if isinstance(weight, Int8):
            weight = Int8(weight.values, weight.scale[:, None])
        products.append(quantized.einsum("ERI,EIO->ERO", rows_ERI, weight))
    return products
