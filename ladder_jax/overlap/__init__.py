"""`ladder-jax overlap`: compile a model's program for a target, and report how much of its
communication is hidden.
"""
