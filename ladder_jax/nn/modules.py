"""The modules of a model: RMSNorm, attention with rotary positions, SwiGLU MLP, embeddings, and a
layer of them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ladder_jax import residual
from ladder_jax.config import Biases, ModelConfig, QKNorm
from ladder_jax.nn import attention, quantized
from ladder_jax.nn.attention import FULL_SEQUENCE, Cache, Kernel, Positions, rotary_tables, rotate
from ladder_jax.nn.parameter import Module, Sizes, ones, residual_writer, sizes_of, zeros
from ladder_jax.parallel import all_reduce, rank, ranks
from ladder_jax.parallel.collectives import Axes, all_gather
from ladder_jax.residual import REDUCED, AllReduce, Normed, State, Step
from ladder_jax.residual.recurrence import LOCAL, Projections
from ladder_jax.scopes import EMBEDDING, QK_NORM

# What a sublayer computes of its input, and last: by `Projections`, because a topology may
# communicate meanwhile. One matrix in place of the three, or of GATE_UP's two, would gain in
# batched decode and in Standard's collective matmuls, and lose in one row's decode and in other
# prefills (experiments/decode_bytes).
_QUERY_KEY_VALUE = functools.partial(
    quantized.products, ("BTD,DNH->BTNH", "BTD,DKH->BTKH", "BTD,DKH->BTKH")
)
_OUT = functools.partial(quantized.biased, "BTNH,NHD->BTD")
_DOWN = functools.partial(quantized.biased, "BTF,FD->BTD")

Reduce = Callable[[Array, Axes], Array]
Attend = Callable[[Array, Array, Array], Array]  # query, key, value -> what is attended to


causal = functools.partial(attention.causal, kernel=Kernel.XLA)
"""Attention of a whole sequence to itself, in plain jax."""


class RMSNorm(Module):
    """x / rms(x) * scale (arXiv 1910.07467), in float32, over the last dimension: D, or H
    (query/key norms).

    dim: the gain's dimensions; those of norms over all heads are NH and KH, and `normalise_heads`
        is their first half.
    """

    def __init__(
        self, config: ModelConfig | Sizes, *, rngs: nnx.Rngs | None = None, dim: str = "D"
    ):
        sizes = sizes_of(config, rngs)
        self.eps = sizes.config.norm_eps
        self.scale = sizes.declare(dim, init=ones)

    def __call__(
        self, x: Array, *, dtype: jnp.dtype | None = None, scale: Array | None = None
    ) -> Array:
        """x [..., D] in any dtype to [..., D] in `dtype`, by default x's. scale: [D], by default
        the norm's own.
        """
        dtype = x.dtype if dtype is None else dtype
        scale = self.scale[...] if scale is None else scale
        scaled = lambda x, scale: self.gain(normalise(x, eps=self.eps), dtype=dtype, scale=scale)
        return recomputed(scaled)(x, scale)

    def gain(self, x: Array, *, dtype: jnp.dtype, scale: Array) -> Array:
        """`x`, normalised before, times the gain."""
        return (x.astype(jnp.float32) * quantized.aligned(scale, x.ndim)).astype(dtype)


class Attention(Module):
    """Grouped-query attention. Under tensor parallelism the heads are split; the output projection
    gives a partial sum.

    With fewer key/value heads than ranks, several ranks hold (and cache) the same head.
    `Attention(config, rngs=nnx.Rngs(0))(x)` is the whole sublayer on one device; inside
    `jax.shard_map` see MLP.
    """

    def __init__(self, config: ModelConfig | Sizes, *, rngs: nnx.Rngs | None = None):
        sizes = sizes_of(config, rngs)
        config = sizes.config
        new = sizes.declare
        self.config = config
        self.query = new("DNH")
        self.key = new("DKH")
        self.value = new("DKH")
        self.out = new("NHD", init=residual_writer(config))
        if config.biases is not Biases.NONE:
            self.query_bias = new("NH", init=zeros)
            self.key_bias = new("KH", init=zeros)
            self.value_bias = new("KH", init=zeros)
        if config.biases in (Biases.ATTENTION, Biases.ALL):
            self.out_bias = new("D", init=zeros)
        if config.qk_norm is not QKNorm.NONE:
            all_heads = config.qk_norm is QKNorm.ALL
            self.query_norm = RMSNorm(sizes, dim="NH" if all_heads else "H")
            self.key_norm = RMSNorm(sizes, dim="KH" if all_heads else "H")

    def __call__(
        self,
        x_BTD: Array,
        *,
        attend: Attend = causal,
        table: tuple[Array, Array] | None = None,
        first_rank: Array | bool = True,
        projections: Projections = LOCAL,
        axes: Axes = (),
    ) -> Array:
        """A rank's partial sum [B, T, D].

        attend: of a rank's query [B, T, N, H], key and value [B, T, K, H]; it may write them to a
            cache.
        table: cosines and sines of the block's positions, each [B, T, H/2] (or [1, T, H/2]); by
            default of 0..T-1.
        first_rank: True on the one rank that adds the output bias.
        projections: with others than LOCAL, x and the result may be this rank's positions of T, and
            the result summed.
        axes: the ranks over which heads are split, for query and key norms over all heads, which
            reduce over them.
        """
        matrices = self.query.get_value(), self.key.get_value(), self.value.get_value()
        query, key, value = projections.into(_QUERY_KEY_VALUE, x_BTD, matrices)
        if hasattr(self, "query_bias"):
            query = quantized.add_bias(query, self.query_bias[...])
            key = quantized.add_bias(key, self.key_bias[...])
            value = quantized.add_bias(value, self.value_bias[...])
        query, key = self._normed(query, key, dtype=x_BTD.dtype, axes=axes)
        if table is None:
            table = rotary_tables(FULL_SEQUENCE.indices(query.shape[1]), config=self.config)
        attended = attend(rotate(query, table), rotate(key, table), value)
        bias = jnp.where(first_rank, self.out_bias[...], 0) if hasattr(self, "out_bias") else None
        return projections.out(_OUT, attended, (self.out.get_value(), bias))

    def _normed(self, query, key, *, dtype, axes):
        norm = self.config.qk_norm
        if norm is QKNorm.NONE:
            return query, key
        if norm is QKNorm.HEAD:
            return self.query_norm(query, dtype=dtype), self.key_norm(key, dtype=dtype)
        query, key = normalise_heads((query, key), eps=self.config.norm_eps, axes=axes)
        query = self.query_norm.gain(query, dtype=dtype, scale=self.query_norm.scale[...])
        return query, self.key_norm.gain(key, dtype=dtype, scale=self.key_norm.scale[...])


class MLP(Module):
    """SwiGLU (arXiv 2002.05202): silu(x gate) * (x up), then down.

    Under tensor parallelism F is split, and the down projection gives a partial sum.

    `MLP(config, rngs=nnx.Rngs(0))(x)` is the whole sublayer on one device. Inside `jax.shard_map`,
    over a rank's shards of its arrays (`nn.partition_specs`), it is this rank's partial sum.
    """

    def __init__(self, config: ModelConfig | Sizes, *, rngs: nnx.Rngs | None = None):
        sizes = sizes_of(config, rngs)
        new = sizes.declare
        self.gate = new("DF")
        self.up = new("DF")
        self.down = new("FD", init=residual_writer(sizes.config))
        if sizes.config.biases is Biases.ALL:
            self.gate_bias = new("F", init=zeros)
            self.up_bias = new("F", init=zeros)
            self.down_bias = new("D", init=zeros)

    def __call__(
        self, x_BTD: Array, *, first_rank: Array | bool = True, projections: Projections = LOCAL
    ) -> Array:
        """A rank's partial sum [B, T, D]. first_rank: True on the one rank that adds the output
        bias.

        projections: with others than LOCAL, x and the result may be this rank's positions of T, and
            the result summed.
        """
        matrices = self.gate.get_value(), self.up.get_value()
        gate, up = projections.into(quantized.GATE_UP, x_BTD, matrices)
        if hasattr(self, "gate_bias"):
            gate = quantized.add_bias(gate, self.gate_bias[...])
            up = quantized.add_bias(up, self.up_bias[...])
        bias = jnp.where(first_rank, self.down_bias[...], 0) if hasattr(self, "down_bias") else None
        hidden = jax.nn.silu(gate) * up
        return projections.out(_DOWN, hidden, (self.down.get_value(), bias))


class Embedding(Module):
    """A [V, D] table, used to look tokens up, to score them, or (tied) both. A rank holds V / ranks
    of its rows.

    On one device `Embedding(config, rngs=nnx.Rngs(0))(tokens)` looks up, and its `logits(x)`
    scores.
    """

    def __init__(self, config: ModelConfig | Sizes, *, rngs: nnx.Rngs | None = None):
        sizes = sizes_of(config, rngs)
        self.vocab_size = sizes.config.vocab_size
        self.dtype = sizes.config.dtype.value
        self.table = sizes.declare("VD")

    @jax.named_scope(EMBEDDING)
    def __call__(self, tokens_BT: Array, *, axes: Axes = (), reduce: Reduce = all_reduce) -> Array:
        """Embeddings [B, T, D] in the compute dtype, equal on all ranks of `axes`.

        reduce: adds what each rank's rows give.
        """
        table = self.table.get_value()
        count = table.shape[0]
        local = tokens_BT - rank(axes) * count
        mine = (local >= 0) & (local < count)
        inside = jnp.clip(local, 0, count - 1)
        rows = quantized.rows(table, inside, dtype=jnp.dtype(self.dtype))
        return reduce(jnp.where(mine[:, :, None], rows, 0), axes)

    def logits(self, x_BTD: Array, *, axes: Axes = ()) -> Array:
        """Float32 scores of this rank's share of the vocabulary, [B, T, V/ranks]; padding is
        -inf.
        """
        table = self.table.get_value()
        logits = quantized.einsum("BTD,VD->BTV", x_BTD, table, dtype=jnp.float32)
        rows = table.shape[0]
        token = rank(axes) * rows + jnp.arange(rows)
        return jnp.where((token < self.vocab_size)[None, None, :], logits, -jnp.inf)


class LayerContext:
    """What all layers of one forward pass over blocks of `length` tokens have in common, on one
    rank of `axes`.

    table: as in Attention. first_rank: whether this is the first. positions: the block's, which
    decide what of a cache it sees, by `kernel`.
    """

    def __init__(
        self,
        config: ModelConfig,
        length: int,
        *,
        axes: Axes,
        kernel: Kernel = Kernel.XLA,
        positions: Positions = FULL_SEQUENCE,
    ):
        self.axes = axes
        self.dtype = jnp.dtype(config.dtype.value)
        self.kernel = kernel
        self.positions = positions
        self.table = rotary_tables(positions.indices(length), config=config)
        self.first_rank = rank(axes) == 0


class Layer(Module):
    """One layer: (norm, attention) and (norm, MLP), over which a wire takes the topology's
    steps.
    """

    def __init__(self, config: ModelConfig | Sizes, *, rngs: nnx.Rngs | None = None):
        sizes = sizes_of(config, rngs)
        self.config = sizes.config
        self.attention_norm = RMSNorm(sizes)
        self.attention = Attention(sizes)
        if not residual.of_model(sizes.config).shared_norm:
            self.mlp_norm = RMSNorm(sizes)
        if sizes.config.moe is None:
            self.mlp = MLP(sizes)
        else:
            from ladder_jax.nn.experts import MoE

            self.mlp = MoE(sizes)

    def __call__(
        self,
        state: State,
        *,
        steps: Sequence[Step],
        wire: AllReduce,
        contexts: Sequence[LayerContext],
        cache: Cache | None = None,
        on_routing: Callable[[Any], None] | None = None,
    ) -> tuple[State, Cache | None]:
        """The state after this layer's `steps`, and its cache with the block's keys and values.

        contexts: one, or those of both halves of an interleaved wire.
        on_routing: of experts, called with the statistics of their router.
        """

        def attend(query, key, value, *, context):
            nonlocal cache
            attended, cache = context.positions.attend(
                query, key, value, cache=cache, kernel=context.kernel
            )
            return attended

        of_parts = [
            self.sublayers(
                functools.partial(attend, context=context), context=context, on_routing=on_routing
            )
            for context in contexts
        ]
        sublayers = of_parts[0] if len(of_parts) == 1 else of_parts
        for step in steps:
            scope = (
                "attention" if step.sublayers == (0,) else "joint" if 0 in step.sublayers else "mlp"
            )
            with jax.named_scope(scope):
                state = wire.advance(state, step, sublayers)
        return state, cache

    def sublayers(
        self,
        attend: Attend,
        *,
        context: LayerContext,
        on_routing: Callable[[Any], None] | None = None,
    ) -> list[Normed]:
        """(attention, MLP); of FarSkip's experts (attention, routed, shared)."""
        norm = self.attention_norm
        attend = functools.partial(
            self.attention,
            attend=attend,
            table=context.table,
            first_rank=context.first_rank,
            axes=context.axes,
        )
        all_heads = self.config.qk_norm is QKNorm.ALL
        first = Normed(attend, norm, context.dtype, norm.scale[...], communicates=all_heads)
        norm = getattr(self, "mlp_norm", norm)
        if self.config.moe is not None:
            return [first, *self.mlp.sublayers(norm, context=context, on_routing=on_routing)]
        mlp = functools.partial(self.mlp, first_rank=context.first_rank)
        return [first, Normed(mlp, norm, context.dtype, norm.scale[...])]


def recomputed(function: Callable) -> Callable:
    """`function`, of which the backward pass keeps the inputs alone: a norm's in the stream's
    dtype, and none of the float32 arrays of the stream's size that it makes of them.
    """
    return jax.checkpoint(function, prevent_cse=False)


def normalise(x: Array, *, eps: float) -> Array:
    """x / rms(x) over the last dimension, in float32."""
    x = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + eps)


def normalise_heads(arrays: Sequence[Array], *, eps: float, axes: Axes) -> list[Array]:
    """Each [B, T, heads, H], a rank's heads, by the rms of all ranks' heads, in float32: one
    all-gather of [n, B, T].

    Heads that several ranks hold are counted once a rank, all alike, which does not change the
    mean. A compiler could merge an all-reduce, or backward that of an equal result, with a
    sublayer's, which then nothing would hide.
    """
    arrays = [x.astype(jnp.float32) for x in arrays]
    means = jnp.stack([jnp.mean(jnp.square(x), axis=(2, 3)) for x in arrays])
    if ranks(axes) > 1:
        with jax.named_scope(QK_NORM):
            of_ranks = all_gather(means[None], axes, dimension=0)
            means = checkpoint_name(jnp.mean(of_ranks, axis=0), REDUCED)
    return [x * jax.lax.rsqrt(mean + eps)[:, :, None, None] for x, mean in zip(arrays, means)]
