"""The section `model.side`: a small network beside the model, which trains in its place (see
side/model.py).
"""

import dataclasses
import math
from typing import Any

from ladder_jax.config.execution import Interleave
from ladder_jax.config.fields import Count, Section, check


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
        fewer, r = math.gcd(self.reduction, model.num_kv_heads), self.reduction
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
        if not _divides(self.reduction, model):
            allowed = ", ".join(str(r) for r in range(1, model.d_model + 1) if _divides(r, model))
            check(
                False,
                f"model.side.reduction={self.reduction} does not divide model.d_model={model.d_model},"
                f" model.d_ff={model.d_ff} and the heads ({model.num_heads} of {model.head_dim},"
                f" {model.num_kv_heads} for keys and values) into a smaller model's (allowed: {allowed})",
            )

    def check_run(self, config: Any) -> None:
        """Raises UserError for settings that a run (a RunConfig) with `model.side` cannot have."""
        train = config.train
        check(
            train.start is not None,
            "model.side needs train.start, the checkpoint whose weights stay frozen",
        )
        also = {"train.freeze": train.freeze, "lora.rank": config.lora.rank}
        also["conversion.steps"] = config.conversion.steps
        for name, value in also.items():
            check(
                not value,
                f"{name}={value} and model.side exclude each other: beside it nothing else trains",
            )
        whole = "the side network reads whole streams"
        check(
            not train.sequence_parallel,
            f"train.sequence_parallel splits the stream, but {whole} (model.side)",
        )
        whole_batch = train.interleave is not Interleave.HALVES
        check(whole_batch, f"train.interleave=2 takes halves in turn, but {whole} (model.side)")
        hidden = config.distill.hidden_weight
        check(
            not hidden,
            f"distill.hidden_weight={hidden} compares the model's own streams, which model.side freezes",
        )


def _divides(reduction: int, model: Any) -> bool:
    fewer = math.gcd(reduction, model.num_kv_heads)
    heads = model.head_dim * fewer % (2 * reduction) == 0  # rotary positions turn pairs
    return heads and model.d_model % reduction == 0 and model.d_ff % reduction == 0
