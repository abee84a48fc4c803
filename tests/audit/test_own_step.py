"""What a user writes, for absent hardware: a gradient step around the model, and the guide's test
of a function.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from ladder_jax.schedule import targets

pytestmark = pytest.mark.audit

GUIDE = pathlib.Path(__file__).parent.parent.parent / "docs" / "guides" / "audit.md"
LAYERS = 2
PROGRAM = """
import dataclasses, json, sys

import jax
import jax.numpy as jnp
from flax import nnx

import ladder_jax as lj
from ladder_jax import nn, schedule

target, layers, compiles = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "compile"
mesh = schedule.make_mesh(target, tensor=8)
config = lj.preset("llama-3-8b", num_layers=layers, vocab_size=1024)
model = lj.Transformer(config, mesh=mesh, params=nn.define(config, mesh=mesh).abstract)
graph, params = nnx.split(model)
loss = lambda params, tokens: jnp.mean(nnx.merge(graph, params)(tokens))
tokens = jax.ShapeDtypeStruct((1, 1024), "int32")
options = model.definition.topology.compile_options(mesh, phase="train")
assert options
lowered = jax.jit(jax.value_and_grad(loss), compiler_options=options).lower(params, tokens)
found = schedule.audit(lowered) if compiles else None
repeated = [r for r in found.reductions if r.collective.executions > 1] if compiles else []
print(json.dumps([[r.status.value, r.count, r.collective.bytes] for r in repeated]))
"""


def reductions(target, *, compiles):
    """Of the loops' bodies: how each came out, how often it runs and its bytes."""
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        target,
        str(LAYERS),
        "compile" if compiles else "lower",
    ]
    done = subprocess.run(
        command,
        env={**os.environ, **targets.ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("target", ["v5e:2x4", "v6e:2x4", "h100:8"])
def test_it_lowers(target):
    if reason := targets.not_installed(targets.parse(target)):
        pytest.skip(reason)
    reductions(target, compiles=False)


def test_on_v5p_its_sublayers_reductions_are_hidden():
    """Two forward and two backward in the loops' bodies; beside them the norm gains' gradients, of
    a few KB.
    """
    found = reductions("v5p:2x2x2", compiles=True)
    assert [status for status, count, size in found if size > 1e6] == ["hidden"] * 4, found


def test_the_guides_test_passes(tmp_path):
    (test,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    (tmp_path / "test_own.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_own.py"]
    environment = {**os.environ, **targets.ENVIRONMENT}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
