"""`ladder-jax VERB ...`: a verb is an entry of `verbs.VERBS`, and the function that the entry
names.
"""

from ladder_jax.cli.main import main, prepare_devices

__all__ = ["main", "prepare_devices"]
