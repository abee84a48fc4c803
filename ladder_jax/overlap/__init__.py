"""`ladder-jax overlap`: compile a model's program for a target, and say how much of its communication is hidden."""
