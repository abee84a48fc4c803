"""The section `model.moe`: a mixture of experts in the place of the layers' MLPs."""

import dataclasses
import enum

from ladder_jax.config.fields import check, check_positive, fit, shown


class RouterSoftmax(enum.Enum):
    """Over which logits of the router the softmax runs whose probabilities weight the chosen experts' outputs."""

    CHOSEN = "chosen"  # those of the chosen experts: the same as over all, then top-k, then renormalised (Mixtral)
    ALL = "all"  # those of all experts: the weights sum to less than 1 (OLMoE, Qwen2-MoE)


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A token's MLP is the weighted sum of `top_k` of `experts` SwiGLU MLPs, chosen by a router; no token is dropped.

    `shared_width`: of one more MLP, the shared expert, that every token passes; `shared_gate`: its output is multiplied
    with a sigmoid of the token's stream. `dense_layers`: how many of the first layers have an MLP of `model.d_ff`.
    """

    experts: int = 8
    top_k: int = 2
    expert_width: int = 128
    softmax: RouterSoftmax = RouterSoftmax.CHOSEN
    shared_width: int = 0  # 0: no shared expert
    shared_gate: bool = False
    dense_layers: int = 0

    __repr__ = shown

    def __post_init__(self):
        fit(self, "model.moe")
        check_positive(self, "model.moe", "experts", "top_k", "expert_width")
        check(
            self.top_k <= self.experts,
            f"model.moe.top_k={self.top_k} chooses more than model.moe.experts={self.experts}",
        )
        check(self.shared_width >= 0, f"model.moe.shared_width must not be negative, not {self.shared_width}")
        check(self.dense_layers >= 0, f"model.moe.dense_layers must not be negative, not {self.dense_layers}")
        check(
            self.shared_width > 0 or not self.shared_gate,
            "model.moe.shared_gate needs a shared expert: model.moe.shared_width",
        )


_QWEN3 = dict(head_dim=128, vocab_size=151936, rope_theta=1_000_000.0, norm_eps=1e-6, qk_norm=True)

EXPERT_SHAPES = {
    "tiny-moe": dict(
        num_layers=4,
        d_model=128,
        num_heads=8,
        num_kv_heads=4,
        vocab_size=256,
        moe=dict(experts=8, top_k=2, expert_width=128, shared_width=128),
    ),
    "qwen3-30b-a3b": dict(
        num_layers=48,
        d_model=2048,
        num_heads=32,
        num_kv_heads=4,
        moe=dict(experts=128, top_k=8, expert_width=768),
        **_QWEN3,
    ),
    "qwen3-235b-a22b": dict(
        num_layers=94,
        d_model=4096,
        num_heads=64,
        num_kv_heads=4,
        moe=dict(experts=128, top_k=8, expert_width=1536),
        **_QWEN3,
    ),
    "mixtral-8x7b": dict(
        num_layers=32,
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=32000,
        rope_theta=1_000_000.0,
        moe=dict(experts=8, top_k=2, expert_width=14336),
    ),
    "olmoe-1b-7b": dict(
        num_layers=16,
        d_model=2048,
        num_heads=16,
        num_kv_heads=16,
        vocab_size=50304,
        qk_norm="all-heads",
        moe=dict(experts=64, top_k=8, expert_width=1024, softmax="all"),
    ),
    "qwen1.5-moe-a2.7b": dict(
        num_layers=24,
        d_model=2048,
        num_heads=16,
        num_kv_heads=16,
        vocab_size=151936,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        biases="qkv",
        moe=dict(experts=60, top_k=4, expert_width=1408, softmax="all", shared_width=5632, shared_gate=True),
    ),
}
"""The fields of the presets with experts (see model.py)."""
