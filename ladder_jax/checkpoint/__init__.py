"""Checkpoints: written in the background, verified against a manifest, and read onto any mesh."""

from ladder_jax.checkpoint.arrays import Key as Key
from ladder_jax.checkpoint.saved import Checkpoint as Checkpoint
from ladder_jax.checkpoint.saved import Damaged as Damaged
from ladder_jax.checkpoint.saved import Pieces as Pieces
from ladder_jax.checkpoint.saved import open_checkpoint as open_checkpoint
from ladder_jax.checkpoint.saved import steps as steps
from ladder_jax.checkpoint.saved import verify as verify
from ladder_jax.checkpoint.store import Store as Store
