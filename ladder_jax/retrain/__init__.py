"""Training that goes on from a checkpoint: frozen layers, a teacher, low-rank factors, conversion
to ladder layers.
"""

from ladder_jax.retrain.sources import Sources as Sources, tokenizer as tokenizer
from ladder_jax.retrain.task import (
    ADAPTERS as ADAPTERS,
    Retraining as Retraining,
    of_run as of_run,
    of_sources as of_sources,
)
