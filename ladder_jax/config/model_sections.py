"""Sections of `model` that few models have: `model.moe`, a mixture of experts in the place of the
layers' MLPs, and `model.side`, a small network beside the model, which trains in its place (see
side/model.py).
"""

import dataclasses
import enum
import math
from typing import Any

from ladder_jax.config.fields import Count, CountOrZero, Positive, Section, check


class RouterSoftmax(enum.Enum):
    """Over which logits of the router the softmax runs whose probabilities weight the chosen
    experts' outputs.
    """

    # those of the chosen experts: the same as over all, then top-k, then renormalised (Mixtral)
    CHOSEN = "chosen"
    ALL = "all"  # those of all experts: the weights sum to less than 1 (OLMoE, Qwen2-MoE)


class ExpertParallelism(enum.Enum):
    """How the rows of experts on other ranks are computed."""

    # each rank computes its experts for all tokens of its group; the sums are reduced
    REDUCE = "reduce"
    # each rank sends its own tokens' rows to the ranks of their experts, and back
    EXCHANGE = "exchange"


@dataclasses.dataclass(frozen=True, repr=False)
class MoEConfig(Section):
    """A token's MLP is the weighted sum of `top_k` of `experts` SwiGLU MLPs, chosen by a router.

    `shared_width`: of one more MLP, the shared expert, that every token passes; `shared_gate`: its
    output is multiplied with a sigmoid of the token's stream. `dense_layers`: how many of the first
    layers have an MLP of `model.d_ff`.
    `capacity`: in training, and wherever rows are exchanged, an expert takes at most so many times
    the mean rows of an expert (1: as many as if the load were even); the rest are dropped.
    `router_bias`: each expert has a bias that counts in choosing experts, not in their weights
    (arXiv 2408.15664); training moves it by train.router_bias_rate.
    """

    experts: Count = 8
    top_k: Count = 2
    expert_width: Count = 128
    softmax: RouterSoftmax = RouterSoftmax.CHOSEN
    shared_width: CountOrZero = 0  # 0: no shared expert
    shared_gate: bool = False
    dense_layers: CountOrZero = 0
    capacity: Positive | None = None  # empty: no row is dropped
    router_bias: bool = False

    NAME = "model.moe"

    def _check(self) -> None:
        check(
            self.top_k <= self.experts,
            f"model.moe.top_k={self.top_k} chooses more than model.moe.experts={self.experts}",
        )
        check(
            self.shared_width > 0 or not self.shared_gate,
            "model.moe.shared_gate needs a shared expert: model.moe.shared_width",
        )

    def padded(self, ranks: int) -> int:
        """How many experts are stored: a multiple of the ranks."""
        return -(-self.experts // ranks) * ranks

    @property
    def drops(self) -> bool:
        """Whether `capacity` can drop a row: an expert takes fewer than all tokens."""
        return self.capacity is not None and self.capacity * self.top_k < self.experts

    def slots(self, tokens: int) -> int:
        """How many rows of a group of `tokens` an expert takes, by `capacity`."""
        return min(tokens, math.ceil(self.capacity * tokens * self.top_k / self.experts))

    def chosen(self, tokens: float) -> float:
        """The share of the experts that at least one of `tokens` tokens chooses, expected of evenly
        loaded experts:

        1 - (1 - k / E)^tokens     since a token chooses k different ones of E
        """
        return 1 - (1 - self.top_k / self.experts) ** tokens


def check_exchange(moe: MoEConfig | None, *, residual: str, sequence_parallel: bool) -> None:
    """Raises UserError for a program whose experts cannot be exchanged."""
    check(moe is not None, "experts=exchange needs experts (model.moe)")
    dense = moe.dense_layers
    check(
        dense == 0,
        f"experts=exchange needs experts in all layers, not model.moe.dense_layers={dense}",
    )
    check(
        residual.partition("-")[0] in ("standard", "ladder", "farskip"),
        f"experts=exchange: not with the residual {residual!r} (allowed: standard, ladder, ladder-K, farskip)",
    )
    check(
        moe.capacity is not None,
        "experts=exchange needs model.moe.capacity, such as 1.25: rows are sent in buffers of a fixed size, of"
        f" which {moe.experts / moe.top_k:g} drops no row",
    )
    check(
        sequence_parallel,
        "experts=exchange needs sequence_parallel: each rank sends the rows of its own positions",
    )


@dataclasses.dataclass(frozen=True, repr=False)
class SideConfig(Section):
    """Ladder side-tuning (arXiv 2206.06522): the model is frozen, and a network beside it reads its
    layers' streams.

    `reduction`: the side network's width, feed-forward size and heads are the model's divided by
    it. Heads are fewer as far as it divides the key/value heads, and beyond that smaller. `model`
    is the ModelConfig with this section.
    """

    reduction: Count = 8

    NAME = "model.side"

    def network(self, model: Any) -> Any:
        """The configuration of the side network's blocks, as many as the model has layers."""
        fewer = math.gcd(self.reduction, model.num_kv_heads)
        r = self.reduction
        return dataclasses.replace(
            model,
            d_model=model.d_model // r,
            d_ff=model.d_ff // r,
            num_heads=model.num_heads // fewer,
            num_kv_heads=model.num_kv_heads // fewer,
            head_dim=model.head_dim * fewer // r,
            residual="standard",
            ladder_layers=None,
            ranks=None,
            side=None,
        )

    def check(self, model: Any) -> None:
        """Raises UserError where the model's sizes cannot be divided, or it has experts."""
        check(
            model.moe is None,
            "model.side is for dense models only, not those with experts (model.moe)",
        )
        r = self.reduction
        fewer = math.gcd(r, model.num_kv_heads)
        divides = model.d_model % r == 0 and model.d_ff % r == 0
        check(
            divides and model.head_dim * fewer % (2 * r) == 0,  # rotary positions turn pairs
            f"model.side.reduction={r} does not divide model.d_model={model.d_model},"
            f" model.d_ff={model.d_ff} and the heads ({model.num_heads} of {model.head_dim},"
            f" {model.num_kv_heads} for keys and values) into a smaller model's",
        )
