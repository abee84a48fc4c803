"""`ladder-jax bench`: time residual topologies side by side, and hold them to what the device itself reaches."""
