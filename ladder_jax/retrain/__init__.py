"""Going on from a checkpoint: what trains and what stays, a teacher, low-rank factors, layers that turn to ladder."""

from ladder_jax.retrain.plan import ADAPTERS as ADAPTERS
from ladder_jax.retrain.plan import NOTHING as NOTHING
from ladder_jax.retrain.plan import Fixed as Fixed
from ladder_jax.retrain.plan import Plan as Plan
from ladder_jax.retrain.plan import of_run as of_run
from ladder_jax.retrain.sources import Sources as Sources
