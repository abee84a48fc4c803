"""`ladder-jax plan`: find meshes, remat policies and microbatches whose training step fits a
target's memory.
"""
