"""Predict how fast each residual topology generates text on a given machine, without access to that
machine.

    from ladder_jax.config import preset
    from ladder_jax.predict import machine, model

    h100 = machine.load("h100-nvlink")  # or a YAML file of yours
    speed = model.speed(preset("llama-3-70b", residual="ladder"), machine=h100, tensor=8, rows=16)
    speed.tokens_per_second, speed.step.seconds, speed.step.exposed

`work` derives a step's kernels from the configuration, `machine` gives the times of kernels and
all-reduces, `program` says which all-reduces a topology may use, and `timeline` simulates them in
the order of the topology's steps. `model.speed` assumes ring all-reduces, as in the programs that
the constants are fitted to; with `by=Choice()` each topology takes the fastest
program, as in `result.predict`, which compares with the fastest Standard. experiments/predict
compares the predictions with measurements.
"""
