"""Measure this machine's constants, for `ladder-jax predict`."""
