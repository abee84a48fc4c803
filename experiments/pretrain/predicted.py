"""Predicted seconds of a training step's forward and backward pass: `ladder_jax.predict.training` has the formula.

The study's figures are of the plain form: the whole stream on every rank, and ring all-reduces.
"""

from ladder_jax.predict.training import Predicted, step

__all__ = ["Predicted", "step"]
