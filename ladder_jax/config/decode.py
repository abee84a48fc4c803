"""The section `decode`."""

import dataclasses
import enum

from ladder_jax.config.execution import Launch, Loop, check_interleave
from ladder_jax.config.fields import check, check_positive, fit, shown


class Quantize(enum.Enum):
    """How the matrices are stored for decoding; compute stays in the model's dtype."""

    NONE = "none"  # in the compute dtype
    INT8 = "int8"  # 8 bits, one scale an output channel


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # only the k most probable tokens; 0: all
    top_p: float = 1.0  # only the most probable tokens that together reach p; 1: all
    min_p: float = 0.0  # only tokens at least p times as probable as the most probable one; 0: all
    repetition_penalty: float = 1.0  # above 1, tokens of the prompt and of the text so far become less likely
    seed: int = 0
    prefill_chunk: int = 2048  # longer prompts are read in blocks of this many tokens, to bound memory
    interleave: int = 1  # 2: prompts are read in two halves in turn, one's sums under the other's compute
    loop: Loop = Loop.UNROLLED
    launch: Launch = Launch.AUTO  # of all-reduces, in prefill and decode
    quantize: Quantize = Quantize.NONE

    __repr__ = shown

    def __post_init__(self):
        fit(self, "decode")
        check_positive(self, "decode", "max_new_tokens", "prefill_chunk")
        check_interleave(self.interleave, name="decode.interleave")
        for name in ("temperature", "top_k"):
            check(getattr(self, name) >= 0, f"decode.{name} must not be negative, not {getattr(self, name)}")
        check(0 < self.top_p <= 1, f"decode.top_p must be above 0 and at most 1, not {self.top_p}")
        check(0 <= self.min_p <= 1, f"decode.min_p must be between 0 and 1, not {self.min_p}")
        check_positive(self, "decode", "repetition_penalty")
        check(0 <= self.seed < 2**32, f"decode.seed must be between 0 and 2**32 - 1, not {self.seed}")
