"""Model shapes by name: those of the Ladder-Residual paper, and what this library tests on."""

from ladder_jax.config.schema import ModelConfig, RopeScaling, build
from ladder_jax.errors import unknown


def _from_scratch(num_layers: int, d_model: int, num_heads: int, d_ff: int) -> dict:
    """The paper's own models: multi-head attention, StarCoder's vocabulary, untied."""
    return dict(
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        d_ff=d_ff,
        vocab_size=49152,
        rope_theta=10_000.0,
    )


def _llama3(num_layers: int, d_model: int, num_heads: int, num_kv_heads: int, d_ff: int, **more) -> dict:
    return dict(
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_ff=d_ff,
        vocab_size=128256,
        rope_theta=500_000.0,
        **more,
    )


_SHAPES = {
    "tiny": dict(num_layers=4, d_model=128, num_heads=8, num_kv_heads=4, d_ff=352, vocab_size=256),
    "smollm2-135m": dict(
        num_layers=30,
        d_model=576,
        num_heads=9,
        num_kv_heads=3,
        d_ff=1536,
        vocab_size=49152,
        rope_theta=100_000.0,
        tie_embeddings=True,
    ),
    "ladder-1b": _from_scratch(40, 1536, 24, 4096),
    "ladder-1.55b": _from_scratch(52, 1536, 24, 4096),
    "ladder-3b": _from_scratch(40, 2304, 36, 9216),
    "llama-3.2-1b": _llama3(16, 2048, 32, 8, 8192, tie_embeddings=True, rope_scaling=RopeScaling(factor=32.0)),
    "llama-3.2-3b": _llama3(28, 3072, 24, 8, 8192, tie_embeddings=True, rope_scaling=RopeScaling(factor=32.0)),
    "llama-3-8b": _llama3(32, 4096, 32, 8, 14336),
    "codellama-34b": dict(
        num_layers=48,
        d_model=8192,
        num_heads=64,
        num_kv_heads=8,
        d_ff=22016,
        vocab_size=32000,
        rope_theta=1_000_000.0,
    ),
    "llama-3-70b": _llama3(80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _llama3(126, 16384, 128, 16, 53248, rope_scaling=RopeScaling(factor=8.0)),
}

NAMES = tuple(_SHAPES)


def settings(name: str) -> dict:
    """The fields of a preset that differ from ModelConfig's defaults; raises UserError for an unknown name."""
    if name not in _SHAPES:
        raise unknown("preset", name, NAMES)
    return dict(_SHAPES[name])


def recipe(name: str) -> dict:
    """The training settings that a preset's name stands for, beside its shape: empty for the paper's recipe."""
    if name != "tiny":
        return {}
    every = dict(checkpoint_every=100, evaluate_every=100)
    return dict(steps=300, batch=16, sequence=128, learning_rate=4e-3, warmup_steps=30, **every)


def preset(name: str, **changes) -> ModelConfig:
    """The model configuration called `name`, with any field changed: `preset("tiny", residual="standard")`."""
    return build(ModelConfig, {**settings(name), **changes}, "model.")
