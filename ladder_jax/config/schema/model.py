"""The section `model`: a dense decoder and its residual topology."""

import dataclasses
import enum

from ladder_jax.config import residual_names
from ladder_jax.config.schema.checks import check, check_positive
from ladder_jax.config.schema.execution import Dtype
from ladder_jax.config.schema.typed import fit


class Biases(enum.Enum):
    """Which matmuls carry a bias."""

    NONE = "none"
    QKV = "qkv"  # Qwen2
    ATTENTION = "attention"  # Llama with attention_bias
    ALL = "all"  # Llama with attention_bias and mlp_bias


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (https://arxiv.org/abs/2407.21783, section 3.4)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self):
        fit(self, "model.rope_scaling")
        check_positive(self, "model.rope_scaling", *(f.name for f in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A dense Llama-family decoder and its residual topology.

    `ladder_layers` makes a hybrid: `"N"` the last N layers, `"i,j"` 0-based layers, `"all"`; or a number, or a list.
    `ranks` belongs to the topologies whose function depends on the number of tensor-parallel
    ranks (ladder-fresh, desync-n); left empty, it is taken from the mesh.
    """

    num_layers: int = 4
    d_model: int = 128
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int | None = None  # empty: d_model / num_heads
    d_ff: int = 352
    vocab_size: int = 256
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    biases: Biases = Biases.NONE
    qk_norm: bool = False
    residual: str = "ladder"
    ladder_layers: str | None = None
    ranks: int | None = None
    dtype: Dtype = Dtype.BFLOAT16  # of matmuls and of the sublayers' all-reduces
    residual_dtype: Dtype = Dtype.BFLOAT16

    def __post_init__(self):
        object.__setattr__(self, "ladder_layers", residual_names.as_text(self.ladder_layers))
        fit(self, "model")
        check_positive(self, "model", "num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff")
        check_positive(self, "model", "vocab_size", "rope_theta", "norm_eps")
        if self.head_dim is None:
            check(
                self.d_model % self.num_heads == 0,
                f"model.num_heads={self.num_heads} does not divide model.d_model={self.d_model}"
                " (or set model.head_dim)",
            )
            object.__setattr__(self, "head_dim", self.d_model // self.num_heads)
        check(self.head_dim > 0 and self.head_dim % 2 == 0, f"model.head_dim must be even, not {self.head_dim}")
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}",
        )
        name = residual_names.parse(self.residual)
        if self.ladder_layers is not None:
            check(name.is_ladder, f"model.ladder_layers needs a ladder kind of residual, not {self.residual!r}")
            residual_names.layer_indices(self.ladder_layers, self.num_layers)
        if self.ranks is not None:
            check(self.ranks > 0, f"model.ranks must be positive, not {self.ranks}")
            check(name.depends_on_ranks, f"model.ranks belongs to ladder-fresh and desync-n, not to {self.residual!r}")
