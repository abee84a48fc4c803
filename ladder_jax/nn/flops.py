"""Floating-point operations of a model's matmuls, from its shapes; a multiply-add is two."""

import jax

from ladder_jax.config import ModelConfig
from ladder_jax.nn.model_def import ModelDef
from ladder_jax.nn.parameter import is_matrix


def attention(config: ModelConfig, *, rows: int, length: int, heads: int) -> int:
    """Scores and values of causal attention, forward, in all layers: 2 B n H T (T + 1) a layer.

    2 H each for the t + 1 positions that t sees. What a kernel computes of the masked half is not counted.
    """
    return 2 * rows * heads * config.head_dim * length * (length + 1) * config.num_layers


def matrix_elements(definition: ModelDef) -> int:
    """Elements of all matrices that multiply a token's activations: the head counts; the embedding's lookup and the
    rows that pad the vocabulary do not.
    """
    leaves = list(zip(jax.tree.leaves(definition.abstract), jax.tree.leaves(definition.dims), strict=True))
    layers = sum(leaf.size for leaf, dims in leaves if is_matrix(dims) and not dims.startswith("V"))
    return layers + definition.config.vocab_size * definition.config.d_model
