"""experiments/minimal.py: its function against NumPy, that it learns and writes, and what a compiler makes of it."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import minimal
from ladder_jax.schedule import targets

CONFIG = minimal.Config(layers=2, width=32, heads=4, hidden=48, vocabulary=128)
TEXT = np.frombuffer(b"the cat sat on the mat, and the rat sat on the cat. " * 40, np.uint8)


def mesh(fsdp: int, tensor: int):
    devices = jax.devices()[: fsdp * tensor]
    return jax.make_mesh((fsdp, tensor), minimal.AXES, (jax.sharding.AxisType.Auto,) * 2, devices=devices)


def dense_loss(params, tokens, *, delay: int) -> float:
    """In float64: sublayer i reads the stream without the newest `delay` outputs."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    layers, table = params["layers"], params["table"]
    norm = lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    length, half = inputs.shape[1], layers["out"].shape[2] // 2
    turn = np.exp(1j * np.arange(length)[:, None] * 10_000.0 ** (-np.arange(half) / half))[:, None]

    def rotate(x):
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], -1)

    def attention(l, x):
        query, key, value = np.einsum("btd,dcnh->cbtnh", norm(x), layers["query_key_value"][l])
        scores = np.einsum("btnh,bsnh->bnts", rotate(query), rotate(key)) / np.sqrt(2 * half)
        powers = np.exp(scores) * np.tri(length)
        attended = np.einsum("bnts,bsnh->btnh", powers / powers.sum(-1, keepdims=True), value)
        return np.einsum("btnh,nhd->btd", attended, layers["out"][l])

    def mlp(l, x):
        gate, up = np.einsum("btd,dcf->cbtf", norm(x), layers["gate_up"][l])
        return gate / (1 + np.exp(-gate)) * up @ layers["down"][l]

    streams = [table[inputs]]
    for i in range(2 * CONFIG.layers):
        sublayer = mlp if i % 2 else attention
        streams.append(streams[-1] + sublayer(i // 2, streams[max(0, i - delay)]))
    scores = norm(streams[-1]) @ table.T
    picked = np.take_along_axis(scores, targets[..., None], -1)[..., 0]
    return (np.log(np.exp(scores).sum(-1)) - picked).mean()


@pytest.mark.parametrize("kind, delay, axes", [("standard", 0, (2, 4)), ("ladder", 1, (4, 2)), ("ladder-2", 2, (1, 4))])
def test_the_loss_is_the_dense_one(kind, delay, axes, monkeypatch):
    """In float32, whose sums of up to 48 terms err by sqrt(48) roundings, four to a sublayer (as tests/cases.py)."""
    monkeypatch.setattr(minimal, "COMPUTE", np.float32)
    config = minimal.dataclasses.replace(CONFIG, kind=kind)
    params = minimal.initial(config, mesh(*axes))
    params = jax.tree.map(lambda a: 10 * a, params)  # large enough that every sublayer counts
    tokens = np.stack([TEXT[n : n + 17] for n in range(4)]).astype(np.int32)
    loss = minimal.over_mesh(minimal.loss, mesh(*axes), config=config, out=minimal.P())
    found, expected = float(jax.jit(loss)(params, tokens)), dense_loss(params, tokens, delay=delay)
    limit = 4 * (2 * CONFIG.layers + 2) * 48**0.5 * 2.0**-24
    assert abs(found - expected) < limit * expected
    assert all(abs(dense_loss(params, tokens, delay=other) - expected) > 0.01 for other in {0, 1, 2} - {delay})


def test_it_learns_and_writes(capsys):
    params, losses = minimal.train(CONFIG, mesh(2, 2), TEXT, steps=40, batch=8, length=16)
    assert losses[0] > 4.5 and losses[-1] < 0.65 * losses[0]
    assert capsys.readouterr().out.startswith("step    0  loss ")
    written = minimal.sample(params, CONFIG, mesh(2, 2), b"the cat ", count=8)
    assert written.startswith(b"the cat ") and len(written) == 16 and set(written) <= set(range(128))


@pytest.mark.audit
@pytest.mark.parametrize("kind, verdict", [("ladder", "16 of 17 all-reduces hidden"), ("standard", "0 of 16 all-red")])
def test_what_the_compiler_hides(kind, verdict):
    if reason := targets.missing(targets.parse("v5p:2x2x2")):
        pytest.skip(reason)
    command = [sys.executable, "-m", "experiments.minimal", "--audit", "v5p:2x2x2", "--residual", kind]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        command, env={**environment, **targets.ENVIRONMENT}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and done.stdout.startswith(verdict), done.stderr + done.stdout
