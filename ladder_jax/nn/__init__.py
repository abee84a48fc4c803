"""Flax modules of a Llama-family model, and what one rank of a mesh computes with them."""

from ladder_jax.nn.embedding import Embedding as Embedding
from ladder_jax.nn.forward import LADDER_FRACTION as LADDER_FRACTION
from ladder_jax.nn.forward import ForwardPass as ForwardPass
from ladder_jax.nn.forward import hidden as hidden
from ladder_jax.nn.forward import logits as logits
from ladder_jax.nn.forward import loss_sum as loss_sum
from ladder_jax.nn.forward import output_table as output_table
from ladder_jax.nn.layer import Layer as Layer
from ladder_jax.nn.loss import cross_entropy as cross_entropy
from ladder_jax.nn.model_def import ModelDef as ModelDef
from ladder_jax.nn.model_def import Params as Params
from ladder_jax.nn.model_def import define as define
from ladder_jax.nn.model_def import initialize as initialize
from ladder_jax.nn.parameter import padded_vocabulary as padded_vocabulary
from ladder_jax.nn.parameter import partition_specs as partition_specs
from ladder_jax.nn.positions import Cache as Cache
from ladder_jax.nn.positions import ChunkedPrefill as ChunkedPrefill
from ladder_jax.nn.positions import DecodeStep as DecodeStep
from ladder_jax.nn.positions import FullSequence as FullSequence
from ladder_jax.nn.positions import Packed as Packed
from ladder_jax.nn.positions import Positions as Positions
from ladder_jax.nn.sublayers import MLP as MLP
from ladder_jax.nn.sublayers import Attention as Attention
from ladder_jax.nn.sublayers import RMSNorm as RMSNorm
from ladder_jax.nn.transformer import Transformer as Transformer
from ladder_jax.nn.transformer import compiled_logits as compiled_logits
