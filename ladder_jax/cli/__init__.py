"""`ladder-jax <verb>`: a file a verb, in `verbs`, each with SUMMARY, EXAMPLE, `arguments(parser)` and `run(args)`."""

from ladder_jax.cli.main import main, prepare_devices

__all__ = ["main", "prepare_devices"]
