"""Count the operations and bytes of one device in a step, kernel by kernel, from the configuration.

Letters as in `nn`: B rows, T tokens per row, D model, V vocabulary; on the device
(`schedule.models`) n query columns, k key columns, f features and v rows of the vocabulary.
Elements have the compute dtype. A matrix product of M x K with K x N counts 2 M K N operations, and
each element of its three matrices once.

Of E evenly loaded experts over R ranks, c for each token, the busiest device has h = E / R of them,
rounded up: it computes B T c h / E of the B T c sorted rows, and reads the matrices of
h x (1 - (1 - c / E)^(B T)) experts: those that at least one token chooses. If ranks exchange rows,
the N = B T / R tokens of a device have S slots with each of E experts (`MoEConfig.slots`; E with
padding). So a device sends E S rows, full or not, and computes as many: those of h experts, whose
matrices are all read.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping

from ladder_jax.config import Dtype, ModelConfig
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.timeline import Work
from ladder_jax.schedule import models
from ladder_jax.schedule.models import Shard

# Sublayers, as a topology's steps name them; of farskip, MLP is the routed experts alone.
ATTENTION = 0
MLP = 1
SHARED = 2
# the MLP of a first layer without experts, which a topology's steps do not tell from experts
DENSE = 3
FLOAT32 = 4  # bytes
# kernels, by name: after a gather, or before a scatter
RINGED = ("query, key, value", "gate, up", "out", "down")
MATMULS = (*RINGED, "experts' gate, up", "experts' down")
LAUNCHES = {
    "norm": 1,
    "rotate": 2,  # rotary embeddings, and writes to the cache
    "attend": 4,  # scores, softmax and values
    "activate": 1,
    "join": 1,
    "router": 12,  # from its logits to the sorted rows' places
    "sort": 1,
    "add up": 1,
    "head": 10,  # all after the last layer
    **dict.fromkeys(MATMULS, 1),
}
"""Numbers of device kernels, by the name of what they compute; of any other none. They were counted
in the H100 schedule of a decode step without communication: 9 in attention, 4 in an MLP, 10
elsewhere (`ladder-jax overlap --target h100:8 --residual no-communication --phase decode`). Those of
experts in that of qwen3-30b-a3b, whose grouped matmuls are kernels: 18, of them 12 before rows are
sorted.
"""


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
        """Two halves of the rows; of an odd number, in a prefill, of the sequence, whose later half
        attends to more.

        (The library gives the first part more positions, so that both have half of the operations:
        left out here.)
        """
        if self.rows % 2 == 0 or self.tokens == 1:
            first = (self.rows + 1) // 2
            return dataclasses.replace(self, rows=first), dataclasses.replace(
                self, rows=self.rows - first
            )
        first = self.tokens // 2
        rest = self.tokens - first
        share = first / self.tokens
        shorter = Block(self.rows, first, self.attended * share, self.cached * share)
        attended = (self.attended * self.tokens - shorter.attended * first) / rest
        return shorter, Block(self.rows, rest, attended, self.cached)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """flops: of matrix products. weights, activations, cache: bytes moved; of the cache as many as
    take its time.
    """

    name: str
    flops: float = 0.0
    weights: float = 0.0
    cache: float = 0.0
    activations: float = 0.0

    @property
    def size(self) -> float:
        """Bytes moved."""
        return self.weights + self.activations + self.cache


@dataclasses.dataclass(frozen=True)
class Recompute:
    """What a backward pass does once more of the forward pass (rematerialisation).

    kernels: by name. gathers: of inputs, as a share of those of the pass; rows: likewise of the
        messages with experts' rows.
    """

    kernels: frozenset[str] = frozenset()
    gathers: float = 0.0
    rows: float = 0.0


NO_RECOMPUTE = Recompute()


def size_of(dtype: Dtype) -> int:
    return {Dtype.BFLOAT16: 2, Dtype.FLOAT32: FLOAT32}[dtype]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's shard on one of `ranks` devices, in this library's programs: those of another
    implementation are a subclass's, such as that of experiments/predict.

    trains: it computes training steps, with logits of all positions, not of a prompt's last one.
    """

    config: ModelConfig
    ranks: int
    trains: bool = False

    # whether embedding and head are whole on every rank, and need no communication
    replicated_head = False

    @functools.cached_property
    def shard(self) -> Shard:
        return models.shard(self.config, ranks=self.ranks)

    @property
    def element_bytes(self) -> int:
        return size_of(self.config.dtype)

    def prefill(self, *, rows: int, prompt_length: int, new_tokens: int = 0) -> Block:
        """A prompt's block, before any new tokens. Query t of 0 .. T - 1 attends to t + 1 positions:
        (T + 1) / 2 in the mean.
        """
        return Block(rows, prompt_length, (prompt_length + 1) / 2, prompt_length)

    def decode_step(self, *, rows: int, prompt_length: int, new_tokens: int) -> Block:
        """The mean block of the G - 1 steps. Step s reads P + s positions and writes one: in the
        mean P + G / 2.
        """
        filled = prompt_length + new_tokens / 2
        return Block(rows, 1, filled, filled)

    def launches(self, block: Block) -> Mapping[str, int]:
        """As LAUNCHES."""
        return LAUNCHES

    def payload(self, block: Block) -> float:
        """Bytes of the stream, and of a sublayer's all-reduce: B T D elements."""
        return block.size * self.config.d_model * self.element_bytes

    def scored(self, block: Block) -> int:
        """Positions whose logits are computed."""
        return block.size if self.trains else block.rows

    def step(
        self, sublayers: tuple[int, ...], block: Block, *, split: int = 1
    ) -> tuple[Kernel, ...]:
        """The kernels of a step: of one sublayer, of attention and MLP whose outputs share one
        all-reduce, or of routed and shared experts.

        split: ranks over which sequence parallelism splits the stream, and so the norms' positions.
        """
        own = dataclasses.replace(block, tokens=block.tokens / split)
        joint = ATTENTION in sublayers and len(sublayers) > 1
        one_norm = joint and self.shares_norm
        kernels: list[Kernel] = []
        for index, sublayer in enumerate(sublayers):
            if index == 0 or (joint and not one_norm):
                kernels.append(self._norm("norm", own, gains=len(sublayers) if one_norm else 1))
            if sublayer == ATTENTION:
                kernels += self._attention(block)
            elif self.config.moe is None or sublayer == DENSE:
                kernels += self._mlp(block, self.config.d_ff)
            else:
                if sublayer == MLP:
                    kernels += self.routed(block)
                # farskip computes a shared expert by itself
                if sublayer == SHARED or self.config.residual != "farskip":
                    kernels += self.shared_expert(block)
        if joint:
            kernels.append(Kernel("join", activations=3 * self.payload(own)))
        return tuple(kernels)

    def shared_expert(self, block: Block) -> list[Kernel]:
        """None without one."""
        width = self.config.moe.shared_width
        return self._mlp(block, width) if width else []

    def routed(self, block: Block, *, exchanged: bool = False) -> list[Kernel]:
        """The kernels of the routed experts. The router's matrix is float32. exchanged: ranks
        exchange rows.

        Otherwise sorting, activating and adding up pass the rows of all ranks, as no array may be
        shorter; the products only this device's.
        """
        moe = self.config.moe
        d_model = self.config.d_model
        size = self.element_bytes
        tokens = block.size / self.ranks if exchanged else block.size
        rows = tokens * moe.top_k
        stream = tokens * d_model * size
        router = d_model * moe.experts
        read = held = moe.padded(self.ranks) / self.ranks
        if exchanged:
            passed = computed = self.buffer_rows(block)
        else:
            passed = rows
            computed = rows * held / moe.experts
            read *= moe.chosen(tokens)
        width = moe.expert_width
        product = functools.partial(self._product, matrices=read)
        return [
            Kernel("router", flops=2 * tokens * router, weights=4 * router, activations=stream),
            Kernel("sort", activations=2 * passed * d_model * size),
            product("experts' gate, up", computed, d_model, 2 * width),
            Kernel("activate", activations=3 * passed * width * size),
            product("experts' down", computed, width, d_model),
            Kernel("add up", activations=3 * rows * d_model * size + stream),
        ]

    def buffer_rows(self, block: Block) -> int:
        """Rows of a device's buffers, where ranks exchange the rows of experts: E S. It sends all of
        them but its own experts' part.
        """
        moe = self.config.moe
        return moe.padded(self.ranks) * moe.slots(round(block.size / self.ranks))

    def ends(self, block: Block) -> tuple[Kernel, ...]:
        """The kernels of the embedding, and of the final norm, the logits and the choice of a
        token.
        """
        size = self.payload(block)
        return (
            Kernel("embedding", weights=size, activations=size),
            self._norm("last norm", block),
            self._product("head", self.scored(block), self.config.d_model, self.vocabulary),
        )

    def memory(self, *, rows: int, capacity: int) -> float:
        """Bytes of weights and of a cache of `capacity` positions per row, without activations."""
        config = self.config
        moe = config.moe
        elements = self.parameters + 2 * config.num_layers * rows * capacity * self.shard.keys
        gains = config.d_model * (2 * config.num_layers + 1)
        total = elements * self.element_bytes + gains * FLOAT32
        if moe:  # routers' matrices are float32
            routers = moe.experts * config.d_model * (config.num_layers - moe.dense_layers)
            total += (FLOAT32 - self.element_bytes) * routers
        return total

    @property
    def parameters(self) -> int:
        """Elements of the matrices and tables on a device."""
        return models.layers(self.config, ranks=self.ranks) + self.tables

    @property
    def tables(self) -> int:
        """Elements of the embedding and of the head, if they are two, on a device."""
        count = 1 if self.config.tie_embeddings else 2
        return count * self.vocabulary * self.config.d_model

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding and of the head on a device."""
        return self.shard.vocabulary

    @property
    def shares_norm(self) -> bool:
        """Whether joint sublayers have one norm."""
        return self.config.residual == "parallel-shared-norm"

    def _product(
        self, name: str, rows: float, inputs: int, outputs: int, *, matrices: float = 1
    ) -> Kernel:
        """Of rows with so many matrices, of which each row meets one."""
        matrix = inputs * outputs
        return Kernel(
            name,
            flops=2 * rows * matrix,
            weights=matrices * matrix * self.element_bytes,
            activations=rows * (inputs + outputs) * self.element_bytes,
        )

    def _norm(self, name: str, block: Block, *, gains: int = 1) -> Kernel:
        """The norm also adds the newest sum to the residual: it reads two arrays and writes two.
        Gains are float32.
        """
        return Kernel(
            name, weights=4 * self.config.d_model * gains, activations=4 * self.payload(block)
        )

    def _attention(self, block: Block) -> list[Kernel]:
        queries = self.shard.queries
        columns = queries + 2 * self.shard.keys
        return [
            self._product("query, key, value", block.size, self.config.d_model, columns),
            Kernel("rotate", activations=2 * block.size * columns * self.element_bytes),
            self.attend(block),
            self._product("out", block.size, queries, self.config.d_model),
        ]

    def attend(self, block: Block) -> Kernel:
        """Scores, softmax and values. The scores stay on the chip."""
        return Kernel(
            "attend",
            flops=4 * block.size * self.shard.queries * block.attended,
            cache=2 * block.rows * block.cached * self.shard.keys * self.element_bytes,
        )

    def _mlp(self, block: Block, width: int) -> list[Kernel]:
        """width: hidden features of all ranks."""
        features = width // self.ranks
        d_model = self.config.d_model
        return [
            self._product("gate, up", block.size, d_model, 2 * features),
            Kernel("activate", activations=3 * block.size * features * self.element_bytes),
            self._product("down", block.size, features, d_model),
        ]


@dataclasses.dataclass(frozen=True)
class Task:
    """A block that one device computes, forward or backward.

    times: how often each kernel runs (backward: 2), without what `recompute` repeats.
    """

    model: Model
    machine: Machine
    block: Block
    times: int = 1
    recompute: Recompute = NO_RECOMPUTE

    def work(self, kernels: Iterable[Kernel]) -> Work:
        """The sum of the kernels' times: the compute of one kernel cannot hide the memory traffic
        of another.
        """
        launches = self.model.launches(self.block)
        busy = idle = 0.0
        for kernel in kernels:
            times = self.times + (kernel.name in self.recompute.kernels)
            busy += times * self.machine.seconds(flops=kernel.flops, size=kernel.size)
            idle += times * self.machine.launch * launches.get(kernel.name, 0)
        return Work(busy, idle)

    def ends(self) -> float:
        """Seconds of the embedding and the head; in training of their three passes."""
        whole = dataclasses.replace(
            self, times=3 if self.model.trains else 1, recompute=NO_RECOMPUTE
        )
        return whole.work(self.model.ends(self.block)).seconds

    @property
    def half(self) -> float:
        """Seconds of a gather or a reduce-scatter of the block's stream."""
        return self.machine.link.half(self.model.payload(self.block), ranks=self.model.ranks)
