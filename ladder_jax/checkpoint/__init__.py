"""Checkpoints: written in the background, verified against a manifest, and read onto any mesh."""

from ladder_jax.checkpoint.arrays import Key as Key
from ladder_jax.checkpoint.saved import (
    Checkpoint as Checkpoint,
    Damaged as Damaged,
    Pieces as Pieces,
    open_checkpoint as open_checkpoint,
    steps as steps,
    verify as verify,
)
from ladder_jax.checkpoint.store import Store as Store
