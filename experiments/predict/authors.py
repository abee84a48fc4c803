"""The model as the benchmark of arXiv 2501.06589 computes it,
https://github.com/mayank31398/ladder-residual-inference, in compiled PyTorch.

Keys and values are repeated for each query head, and a mask covers the padded cache. Scores are in
memory: they are written, read twice and written by the softmax, and read again, and their mask is
read. A matrix product of several rows is a library call with split-K, so a second kernel adds up
the parts; for one row PyTorch generates a kernel that includes the activation
(`coordinate_descent_tuning`).
"""

import dataclasses
from collections.abc import Mapping

from ladder_jax.predict.work import LAUNCHES, MATMULS, Block, Kernel, Model

CACHE_SPEED = 1.13
"""Bandwidth of reading the cache over that of reading weights: repeated reads hit an on-chip cache.
Fitted: python -m experiments.predict.
"""
SCORE = 12  # bytes of memory traffic per attention score in a prefill


class Authors(Model):
    """Logits of all positions of a prompt are computed. Joint sublayers share one norm and one
    matrix product, regardless of the residual's name.
    """

    replicated_head = True
    shares_norm = True

    def prefill(self, *, rows: int, prompt_length: int, new_tokens: int = 0) -> Block:
        """Attention processes all positions of prompt and new tokens, not only the filled ones."""
        padded = prompt_length + new_tokens
        return Block(rows, prompt_length, padded, padded)

    def decode_step(self, *, rows: int, prompt_length: int, new_tokens: int) -> Block:
        padded = prompt_length + new_tokens
        return Block(rows, 1, padded, padded)

    def launches(self, block: Block) -> Mapping[str, int]:
        if block.size == 1:
            return LAUNCHES | {"attend": 3, "activate": 0}
        return LAUNCHES | {"attend": 3} | dict.fromkeys(MATMULS, 2)

    def scored(self, block: Block) -> int:
        return block.size

    @property
    def vocabulary(self) -> int:
        return self.config.vocab_size

    def step(
        self, sublayers: tuple[int, ...], block: Block, *, split: int = 1
    ) -> tuple[Kernel, ...]:
        kernels = super().step(sublayers, block, split=split)
        if len(sublayers) == 1:
            return kernels
        # no kernel of its own
        fused = lambda one: (
            dataclasses.replace(one, name="fused") if one.name == "gate, up" else one
        )
        return tuple(map(fused, kernels))

    def attend(self, block: Block) -> Kernel:
        queries = self.shard.queries
        heads = queries // self.config.head_dim
        scores = SCORE * block.size * heads * block.cached
        return Kernel(
            "attend",
            flops=4 * block.size * queries * block.attended,
            cache=2 * block.rows * block.cached * queries * self.element_bytes / CACHE_SPEED,
            activations=scores if block.tokens > 1 else 0.0,
        )
