"""Predict how fast each residual topology generates text on a given machine, without access to that machine.

    from ladder_jax.config import preset
    from ladder_jax.predict import machine, model

    h100 = machine.load("h100-nvlink")  # or a YAML file of yours
    speed = model.speed(preset("llama-3-70b", residual="ladder"), machine=h100, tensor=8, rows=16)
    speed.tokens_per_second, speed.step.seconds, speed.step.exposed

`work` derives a step's kernels from the configuration, `machine` and `link` give the times of kernels and all-reduces,
and `timeline` simulates them in the order of the topology's steps. experiments/predict compares the predictions with
measurements.
"""
