"""`ladder-jax plan`: which meshes, remat policies and microbatches of a training step fit a target's memory."""
