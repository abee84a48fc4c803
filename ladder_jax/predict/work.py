"""Count the operations and bytes of one device in a step, kernel by kernel, from the configuration.

Letters as in `nn`: B rows, T tokens per row, D model, V vocabulary; on the device (`schedule.shards`) n query columns,
k key columns, f features and v rows of the vocabulary. Elements have the compute dtype. A matrix product of M x K with
K x N counts 2 M K N operations, and each element of its three matrices once.

Of E evenly loaded experts over R ranks, c for each token, a device computes B T c / R of the B T c sorted rows, and
reads the matrices of E / R x (1 - (1 - c / E)^(B T)) experts: those that at least one token chooses.
"""

import dataclasses

from ladder_jax.config import Dtype, ModelConfig
from ladder_jax.predict.implementation import Cache, CacheReads, Head, Implementation, Launches, Scored
from ladder_jax.schedule import shards
from ladder_jax.schedule.shards import Shard

ATTENTION, MLP, SHARED = 0, 1, 2  # as a topology's steps name them; of farskip, MLP is the routed experts alone
DENSE = 3  # the MLP of a first layer without experts, which a topology's steps do not tell from experts
AFTER_GATHER, BEFORE_SCATTER = ("query, key, value", "gate, up"), ("out", "down")  # kernels, by name


@dataclasses.dataclass(frozen=True)
class Block:
    """B rows of T tokens that are computed at once.

    attended: cached positions of a row over which attention computes, the mean over its queries.
    cached: cached positions of a row that are read from memory.
    """

    rows: int
    tokens: float
    attended: float
    cached: float

    @property
    def size(self) -> int:
        return self.rows * self.tokens

    @property
    def halves(self) -> tuple["Block", "Block"]:
        """Two halves of the rows; of an odd number, in a prefill, of the sequence, whose later half attends to more.

        (The library gives the first part more positions, so that both have half of the operations: left out here.)
        """
        if self.rows % 2 == 0 or self.tokens == 1:
            first = (self.rows + 1) // 2
            return dataclasses.replace(self, rows=first), dataclasses.replace(self, rows=self.rows - first)
        first = self.tokens // 2
        rest, share = self.tokens - first, first / self.tokens
        shorter = Block(self.rows, first, self.attended * share, self.cached * share)
        attended = (self.attended * self.tokens - shorter.attended * first) / rest
        return shorter, Block(self.rows, rest, attended, self.cached)


def prefill(*, rows: int, prompt_length: int, new_tokens: int, implementation: Implementation) -> Block:
    """A prompt's block. Query t of 0 .. T - 1 attends to t + 1 positions: (T + 1) / 2 in the mean."""
    if implementation.cache is Cache.PADDED:
        return Block(rows, prompt_length, prompt_length + new_tokens, prompt_length + new_tokens)
    return Block(rows, prompt_length, (prompt_length + 1) / 2, prompt_length)


def decode_step(*, rows: int, prompt_length: int, new_tokens: int, implementation: Implementation) -> Block:
    """The mean block of the G - 1 steps. Step s reads P + s positions and writes one: in the mean P + G / 2."""
    filled = prompt_length + (new_tokens if implementation.cache is Cache.PADDED else new_tokens / 2)
    return Block(rows, 1, filled, filled)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """flops: of matrix products. weights, cache, activations: bytes moved. launches: number of device kernels."""

    name: str
    flops: float = 0.0
    weights: float = 0.0
    cache: float = 0.0
    activations: float = 0.0
    launches: float = 0.0


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's shard on one of `ranks` devices, in a program of kind `implementation`."""

    config: ModelConfig
    ranks: int
    implementation: Implementation

    @property
    def shard(self) -> Shard:
        return shards.shard(self.config, ranks=self.ranks)

    @property
    def element_bytes(self) -> int:
        return 2 if self.config.dtype is Dtype.BFLOAT16 else 4

    def payload(self, block: Block) -> int:
        """Bytes of a sublayer's all-reduce: B T D elements."""
        return block.size * self.config.d_model * self.element_bytes

    def step(
        self, sublayers: tuple[int, ...], block: Block, *, shared_norm: bool, split: int = 1
    ) -> tuple[Kernel, ...]:
        """The kernels of a step: of one sublayer, of attention and MLP whose outputs share one all-reduce, or of routed
        and shared experts.

        split: ranks over which sequence parallelism splits the stream, and so the norms' positions.
        """
        own = dataclasses.replace(block, tokens=block.tokens / split) if split > 1 else block
        launches, joint = self._launches(block), ATTENTION in sublayers and len(sublayers) > 1
        one_product = joint and self.implementation.fused
        one_norm = one_product or (joint and shared_norm)
        kernels: list[Kernel] = []
        for index, sublayer in enumerate(sublayers):
            if index == 0 or (joint and not one_norm):
                kernels.append(self._norm(own, launches, gains=len(sublayers) if one_norm else 1))
            if sublayer == ATTENTION:
                kernels += self._attention(block, launches)
            elif self.config.moe is None or sublayer == DENSE:
                features = self.config.d_ff // self.ranks
                kernels += self._mlp(block, launches, features=features, first=0 if one_product else launches.matmul)
            else:
                kernels += self._experts(sublayer, block, launches)
        if joint:
            moved = 3 * own.size * self.config.d_model * self.element_bytes
            kernels.append(Kernel("join", activations=moved, launches=launches.join))
        return tuple(kernels)

    def shared_expert(self, block: Block) -> list[Kernel]:
        """None without one."""
        if not (width := self.config.moe.shared_width):
            return []
        launches = self._launches(block)
        return self._mlp(block, launches, features=width // self.ranks, first=launches.matmul)

    def embedding(self, block: Block) -> Kernel:
        size = block.size * self.config.d_model * self.element_bytes
        return Kernel("embedding", weights=size, activations=size)

    def head(self, block: Block) -> tuple[Kernel, ...]:
        """The kernels of the final norm, the logits and the choice of a token."""
        count = block.size if self.implementation.scored is Scored.ALL else block.rows
        scored = dataclasses.replace(block, rows=count, tokens=1)
        return (
            self._norm(block, dataclasses.replace(self._launches(block), norm=0)),
            self._product("head", scored, self.config.d_model, self._vocabulary, self._launches(block).last),
        )

    def memory(self, *, rows: int, capacity: int) -> float:
        """Bytes of weights and of a cache of `capacity` positions per row, without activations."""
        shard, config = self.shard, self.config
        tables = 1 if config.tie_embeddings else 2
        matrices = shards.layers(config, ranks=self.ranks) + tables * self._vocabulary * config.d_model
        gains = 4 * config.d_model * (2 * config.num_layers + 1)
        cache = 2 * config.num_layers * rows * capacity * shard.keys * self.element_bytes
        return matrices * self.element_bytes + gains + cache

    @property
    def _vocabulary(self) -> int:
        replicated = self.implementation.head is Head.REPLICATED
        return self.config.vocab_size if replicated else self.shard.vocabulary

    def _launches(self, block: Block) -> Launches:
        return self.implementation.one_row if block.size == 1 else self.implementation.launches

    def _product(self, name: str, block: Block, inputs: int, outputs: int, launches: float) -> Kernel:
        moved = block.size * (inputs + outputs) * self.element_bytes
        matrix = inputs * outputs
        return Kernel(name, 2 * block.size * matrix, matrix * self.element_bytes, activations=moved, launches=launches)

    def _norm(self, block: Block, launches: Launches, *, gains: int = 1) -> Kernel:
        """The norm also adds the newest sum to the residual: it reads two arrays and writes two. Gains are float32."""
        moved = 4 * block.size * self.config.d_model * self.element_bytes
        return Kernel("norm", weights=4 * self.config.d_model * gains, activations=moved, launches=launches.norm)

    def _attention(self, block: Block, launches: Launches) -> list[Kernel]:
        shard, config, heads = self.shard, self.config, self.shard.queries // self.config.head_dim
        columns = shard.queries + 2 * shard.keys
        per_query = self.implementation.cache_reads is CacheReads.PER_QUERY_HEAD
        columns_read = shard.queries if per_query else shard.keys
        scores = 0 if block.tokens == 1 else self.implementation.score_bytes * block.size * heads * block.cached
        return [
            self._product("query, key, value", block, config.d_model, columns, launches.matmul),
            Kernel("rotate", activations=2 * block.size * columns * self.element_bytes, launches=launches.rotate),
            Kernel(
                "attend",
                flops=4 * block.size * shard.queries * block.attended,
                cache=2 * block.rows * block.cached * columns_read * self.element_bytes,
                activations=scores,
                launches=launches.attend,
            ),
            self._product("out", block, shard.queries, config.d_model, launches.matmul),
        ]

    def _mlp(self, block: Block, launches: Launches, *, features: int, first: float) -> list[Kernel]:
        d_model = self.config.d_model
        moved = 3 * block.size * features * self.element_bytes
        return [
            self._product("gate, up", block, d_model, 2 * features, first),
            Kernel("activate", activations=moved, launches=launches.activate),
            self._product("down", block, features, d_model, launches.matmul),
        ]

    def _experts(self, sublayer: int, block: Block, launches: Launches) -> list[Kernel]:
        """Routed and shared experts, or of farskip one of them."""
        kernels = self._routed(block, launches) if sublayer == MLP else []
        if sublayer == SHARED or self.config.residual != "farskip":
            kernels += self.shared_expert(block)
        return kernels

    def _routed(self, block: Block, launches: Launches) -> list[Kernel]:
        """The router's matrix is float32. Sorting, activating and adding up pass the rows of all ranks, as no array may
        be shorter; the products only this device's."""
        moe, d_model, size = self.config.moe, self.config.d_model, self.element_bytes
        rows, stream = block.size * moe.top_k, block.size * d_model * size
        sorted_rows, hidden = rows * d_model * size, rows * moe.expert_width * size
        router = d_model * moe.experts
        return [
            Kernel("router", 2 * block.size * router, 4 * router, activations=stream, launches=launches.route),
            Kernel("sort", activations=2 * sorted_rows, launches=1),
            self._grouped("gate, up", block, d_model, 2 * moe.expert_width, launches.matmul),
            Kernel("activate", activations=3 * hidden, launches=launches.activate),
            self._grouped("down", block, moe.expert_width, d_model, launches.matmul),
            Kernel("add up", activations=3 * sorted_rows + stream, launches=1),
        ]

    def _grouped(self, name: str, block: Block, inputs: int, outputs: int, launches: float) -> Kernel:
        """A product of this device's rows with their experts' matrices."""
        moe = self.config.moe
        rows, read = block.size * moe.top_k / self.ranks, shards.chosen(moe, tokens=block.size)
        weights = moe.experts / self.ranks * read * inputs * outputs * self.element_bytes
        moved = rows * (inputs + outputs) * self.element_bytes
        return Kernel(name, 2 * rows * inputs * outputs, weights, activations=moved, launches=launches)
