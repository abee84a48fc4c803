"""`ladder-jax bench`: time residual topologies side by side, and compare them with the device's
measured limits.
"""
