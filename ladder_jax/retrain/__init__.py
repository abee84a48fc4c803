"""Training that goes on from a checkpoint: frozen layers, a teacher, low-rank factors, conversion
to ladder layers.
"""

from ladder_jax.retrain.sources import Sources as Sources
from ladder_jax.retrain.sources import tokenizer as tokenizer
from ladder_jax.retrain.task import ADAPTERS as ADAPTERS
from ladder_jax.retrain.task import Retraining as Retraining
from ladder_jax.retrain.task import of_run as of_run
from ladder_jax.retrain.task import of_sources as of_sources
