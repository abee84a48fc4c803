"""How fast each residual topology would generate on a given machine, which need not be here.

    from ladder_jax.config import preset
    from ladder_jax.predict import machine, model

    h100 = machine.load("h100-nvlink")  # or a YAML file of yours
    found = model.speed(preset("llama-3-70b", residual="ladder"), machine=h100, tensor=8, rows=16)
    found.tokens_per_second, found.step.seconds, found.step.exposed

`work` counts a step's kernels from the configuration, `machine` and `link` say how long each and each all-reduce takes,
`timeline` plays them in the order of the topology's own plan; experiments/predict holds it all to measurements.
"""
