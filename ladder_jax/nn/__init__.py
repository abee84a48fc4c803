"""Flax modules of a Llama-family model, and what one rank of a mesh computes with them."""

from ladder_jax.nn.attention import (
    Cache as Cache,
    ChunkedPrefill as ChunkedPrefill,
    DecodeStep as DecodeStep,
    FullSequence as FullSequence,
    Packed as Packed,
    Positions as Positions,
)
from ladder_jax.nn.loss import cross_entropy as cross_entropy
from ladder_jax.nn.model_def import (
    ModelDef as ModelDef,
    Params as Params,
    define as define,
    initialize as initialize,
    matrix_elements as matrix_elements,
)
from ladder_jax.nn.modules import (
    MLP as MLP,
    Attention as Attention,
    Embedding as Embedding,
    Layer as Layer,
    RMSNorm as RMSNorm,
)
from ladder_jax.nn.parameter import (
    padded_vocabulary as padded_vocabulary,
    partition_specs as partition_specs,
)
from ladder_jax.nn.transformer import (
    ForwardPass as ForwardPass,
    Transformer as Transformer,
    compiled_logits as compiled_logits,
    forward_pass as forward_pass,
    hidden as hidden,
    logits as logits,
    loss_sum as loss_sum,
    output_table as output_table,
)
