"""Checkpoints in and out."""

from ladder_jax.checkpoint.store import Checkpoint as Checkpoint
from ladder_jax.checkpoint.store import Store as Store
from ladder_jax.checkpoint.store import open_checkpoint as open_checkpoint
from ladder_jax.checkpoint.store import steps as steps
