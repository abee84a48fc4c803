"""What one device computes and moves in a step: kernel by kernel, from the configuration alone.

Letters as in `nn`: B rows, T tokens a row, D model, V vocabulary; n query columns, k key columns, f features and v
rows of the vocabulary on the device (`schedule.shards`). Elements are of the compute dtype; a matrix product of M x K
with K x N counts 2 M K N operations, and its three matrices' elements once.
"""

import dataclasses

from ladder_jax.config import Dtype, ModelConfig
from ladder_jax.predict.implementation import Cache, Head, Implementation, Launches, Readers, Scored
from ladder_jax.schedule.shards import Shard, shard

ATTENTION, MLP = 0, 1  # as a topology's steps name them


@dataclasses.dataclass(frozen=True)
class Block:
    """B rows of T tokens that are computed at once. reads: cached positions of a row that attention works on, in the
    mean over its queries; keeps: cached positions that it moves once."""

    rows: int
    tokens: int
    reads: float
    keeps: float

    @property
    def size(self) -> int:
        return self.rows * self.tokens


def prefill(*, rows: int, prompt_length: int, new_tokens: int, implementation: Implementation) -> Block:
    """Reads: query t of 0 .. T - 1 sees t + 1 positions, (T + 1) / 2 in the mean."""
    if implementation.cache is Cache.PADDED:
        return Block(rows, prompt_length, prompt_length + new_tokens, prompt_length + new_tokens)
    return Block(rows, prompt_length, (prompt_length + 1) / 2, prompt_length)


def decode_step(*, rows: int, prompt_length: int, new_tokens: int, implementation: Implementation) -> Block:
    """The mean of a generation's G - 1 steps: step s reads P + s positions and writes one, P + G / 2 in the mean."""
    filled = prompt_length + (new_tokens if implementation.cache is Cache.PADDED else new_tokens / 2)
    return Block(rows, 1, filled, filled)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """flops: operations of matrix products. weights, cache, activations: bytes moved. Launches: device kernels."""

    name: str
    flops: float = 0.0
    weights: float = 0.0
    cache: float = 0.0
    activations: float = 0.0
    launches: float = 0.0


@dataclasses.dataclass(frozen=True)
class Model:
    """A model on one of `ranks` devices, as `implementation` runs it."""

    config: ModelConfig
    ranks: int
    implementation: Implementation

    @property
    def held(self) -> Shard:
        return shard(self.config, ranks=self.ranks)

    @property
    def element(self) -> int:
        """Bytes."""
        return 2 if self.config.dtype is Dtype.BFLOAT16 else 4

    def payload(self, block: Block) -> int:
        """Bytes of a sublayer's all-reduce: B T D elements."""
        return block.size * self.config.d_model * self.element

    def step(self, sublayers: tuple[int, ...], block: Block, *, shared_norm: bool) -> tuple[Kernel, ...]:
        """A topology's step: one sublayer, or attention and MLP that are added before one all-reduce."""
        started, joint = self._launches(block), len(sublayers) > 1
        one_product = joint and self.implementation.fused
        one_norm = one_product or (joint and shared_norm)
        kernels: list[Kernel] = []
        for index, which in enumerate(sublayers):
            if index == 0 or not one_norm:
                kernels.append(self._norm(block, started, gains=len(sublayers) if one_norm else 1))
            if which == ATTENTION:
                kernels += self._attention(block, started)
            else:
                kernels += self._mlp(block, started, first=0 if one_product else started.matmul)
        if joint:
            moved = 3 * block.size * self.config.d_model * self.element
            kernels.append(Kernel("join", activations=moved, launches=started.join))
        return tuple(kernels)

    def embedding(self, block: Block) -> Kernel:
        size = block.size * self.config.d_model * self.element
        return Kernel("embedding", weights=size, activations=size)

    def head(self, block: Block) -> tuple[Kernel, ...]:
        """The final norm, logits, and the choice of a token."""
        positions = block.size if self.implementation.scored is Scored.ALL else block.rows
        scored = dataclasses.replace(block, rows=positions, tokens=1)
        return (
            self._norm(block, dataclasses.replace(self._launches(block), norm=0)),
            self._product("head", scored, self.config.d_model, self._vocabulary, self._launches(block).last),
        )

    def memory(self, *, rows: int, capacity: int) -> float:
        """Bytes of weights and of a cache of `capacity` positions a row; activations are left out."""
        held, config = self.held, self.config
        tables = 1 if config.tie_embeddings else 2
        matrices = config.num_layers * (held.attention + held.mlp) + tables * self._vocabulary * config.d_model
        gains = 4 * config.d_model * (2 * config.num_layers + 1)
        cache = 2 * config.num_layers * rows * capacity * held.keys * self.element
        return matrices * self.element + gains + cache

    @property
    def _vocabulary(self) -> int:
        replicated = self.implementation.head is Head.REPLICATED
        return self.config.vocab_size if replicated else self.held.vocabulary

    def _launches(self, block: Block) -> Launches:
        return self.implementation.one_row if block.size == 1 else self.implementation.launches

    def _product(self, name: str, block: Block, inputs: int, outputs: int, launches: float) -> Kernel:
        moved = block.size * (inputs + outputs) * self.element
        matrix = inputs * outputs
        return Kernel(name, 2 * block.size * matrix, matrix * self.element, activations=moved, launches=launches)

    def _norm(self, block: Block, started: Launches, *, gains: int = 1) -> Kernel:
        """It adds the newest sum to the residual too: two arrays read, two written. Gains are float32."""
        moved = 4 * block.size * self.config.d_model * self.element
        return Kernel("norm", weights=4 * self.config.d_model * gains, activations=moved, launches=started.norm)

    def _attention(self, block: Block, started: Launches) -> list[Kernel]:
        held, config, heads = self.held, self.config, self.held.queries // self.config.head_dim
        columns = held.queries + 2 * held.keys
        readers = held.queries if self.implementation.readers is Readers.QUERIES else held.keys
        scores = 0 if block.tokens == 1 else self.implementation.score_bytes * block.size * heads * block.keeps
        return [
            self._product("query, key, value", block, config.d_model, columns, started.matmul),
            Kernel("rotate", activations=2 * block.size * columns * self.element, launches=started.rotate),
            Kernel(
                "attend",
                flops=4 * block.size * held.queries * block.reads,
                cache=2 * block.rows * block.keeps * readers * self.element,
                activations=scores,
                launches=started.attend,
            ),
            self._product("out", block, held.queries, config.d_model, started.matmul),
        ]

    def _mlp(self, block: Block, started: Launches, *, first: float) -> list[Kernel]:
        held, d_model = self.held, self.config.d_model
        moved = 3 * block.size * held.features * self.element
        return [
            self._product("gate, up", block, d_model, 2 * held.features, first),
            Kernel("activate", activations=moved, launches=started.activate),
            self._product("down", block, held.features, d_model, started.matmul),
        ]
