"""experiments/minimal.py: its loss is the reference's, it learns and writes, and a compiler hides
its all-reduces.
"""

import jax
import numpy as np
import pytest

from experiments import minimal
from ladder_jax.schedule import targets
from tests import reference

CONFIG = minimal.Config(layers=2, width=32, heads=4, hidden=48, vocabulary=128)
TEXT = np.frombuffer(b"the cat sat on the mat, and the rat sat on the cat. " * 40, np.uint8)


def mesh(fsdp, tensor):
    devices = jax.devices()[: fsdp * tensor]
    return jax.make_mesh(
        (fsdp, tensor), minimal.AXES, (jax.sharding.AxisType.Auto,) * 2, devices=devices
    )


def dense_loss(params, tokens, *, delay):
    """The reference's, in float64: sublayer i reads the stream without the newest `delay`
    outputs.
    """
    layers, ones = params["layers"], np.ones((CONFIG.layers, CONFIG.width))
    split = lambda name, *parts: dict(
        zip(parts, np.moveaxis(np.asarray(layers[name]), 2, 0), strict=True)
    )
    stored = {
        "embedding": {"table": params["table"]},
        "final_norm": {"scale": ones[0]},
        "layers": {
            "attention_norm": {"scale": ones},
            "attention": {
                **split("query_key_value", "query", "key", "value"),
                "out": layers["out"],
            },
            "mlp_norm": {"scale": ones},
            "mlp": {**split("gate_up", "gate", "up"), "down": layers["down"]},
        },
    }
    shape = reference.Shape(
        CONFIG.layers, CONFIG.heads, CONFIG.heads, CONFIG.vocabulary, "ladder", delay, eps=1e-6
    )
    return float(reference.evaluate(reference.loss, stored, tokens, shape))


@pytest.mark.parametrize(
    "kind, delay, axes", [("standard", 0, (2, 4)), ("ladder", 1, (4, 2)), ("ladder-2", 2, (1, 4))]
)
def test_the_loss_is_the_dense_one(kind, delay, axes, monkeypatch):
    """In float32, whose sums of up to 48 terms err by sqrt(48) roundings, four to a sublayer (as
    tests/cases.py).
    """
    monkeypatch.setattr(minimal, "COMPUTE", np.float32)
    config = minimal.dataclasses.replace(CONFIG, kind=kind)
    params = minimal.initial(config, mesh(*axes))
    params = jax.tree.map(lambda a: 10 * a, params)  # large enough that every sublayer counts
    tokens = np.stack([TEXT[n : n + 17] for n in range(4)]).astype(np.int32)
    loss = minimal.over_mesh(minimal.loss, mesh(*axes), config=config, out=minimal.P())
    found = float(jax.jit(loss)(params, tokens))
    expected = dense_loss(params, tokens, delay=delay)
    limit = 4 * (2 * CONFIG.layers + 2) * 48**0.5 * 2.0**-24
    assert abs(found - expected) < limit * expected
    assert all(
        abs(dense_loss(params, tokens, delay=other) - expected) > 0.01
        for other in {0, 1, 2} - {delay}
    )


def test_it_learns_and_writes(capsys):
    config = minimal.dataclasses.replace(CONFIG, layers=1)
    params, losses = minimal.train(config, mesh(2, 2), TEXT, steps=40, batch=8, length=16)
    assert losses[0] > 4.5
    assert losses[-1] < 0.65 * losses[0]
    assert capsys.readouterr().out.startswith("step    0  loss ")
    written = minimal.sample(params, config, mesh(2, 2), b"the cat ", count=8)
    assert written.startswith(b"the cat ")
    assert len(written) == 16
    assert set(written) <= set(range(128))


@pytest.mark.audit
@pytest.mark.parametrize(
    "kind, verdict", [("ladder", "16 of 17 all-reduces hidden"), ("standard", "0 of 16 all-red")]
)
def test_what_the_compiler_hides(kind, verdict, monkeypatch, run_python):
    if reason := targets.not_installed(targets.parse("v5p:2x2x2")):
        pytest.skip(reason)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    words = f"-m experiments.minimal --audit v5p:2x2x2 --residual {kind}".split()
    done = run_python(*words, cwd=".", timeout=600, check_status=0, **targets.ENVIRONMENT)
    assert done.stdout.startswith(verdict)
