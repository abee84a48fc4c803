"""Flax modules: what has parameters, and what one rank of a mesh computes with them."""

from ladder_jax.nn.embedding import cross_entropy as cross_entropy
from ladder_jax.nn.forward import LATE as LATE
from ladder_jax.nn.forward import Pass as Pass
from ladder_jax.nn.parameter import padded_vocabulary as padded_vocabulary
from ladder_jax.nn.place import Begin as Begin
from ladder_jax.nn.place import Cache as Cache
from ladder_jax.nn.place import Extend as Extend
from ladder_jax.nn.place import Next as Next
from ladder_jax.nn.place import Packed as Packed
from ladder_jax.nn.place import Place as Place
from ladder_jax.nn.transformer import Definition as Definition
from ladder_jax.nn.transformer import Params as Params
from ladder_jax.nn.transformer import Transformer as Transformer
from ladder_jax.nn.transformer import compiled_logits as compiled_logits
from ladder_jax.nn.transformer import define as define
from ladder_jax.nn.transformer import hidden as hidden
from ladder_jax.nn.transformer import initialize as initialize
from ladder_jax.nn.transformer import logits as logits
from ladder_jax.nn.transformer import loss_sum as loss_sum
from ladder_jax.nn.transformer import output_table as output_table
