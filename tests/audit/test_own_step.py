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

GUIDE = pathlib.Path(__file__).parent.parent.parent / "docs/guides/audit.md"
PROGRAM = """
import dataclasses, json, sys

import jax
import jax.numpy as jnp
from flax import nnx

import ladder_jax as lj
from ladder_jax import nn, schedule

mesh = schedule.make_mesh(sys.argv[1], tensor=8)
config = lj.preset("llama-3-8b", num_layers=2, vocab_size=1024)
model = lj.Transformer(config, mesh=mesh, params=nn.define(config, mesh=mesh).abstract)
graph, params = nnx.split(model)
loss = lambda params, tokens: jnp.mean(nnx.merge(graph, params)(tokens))
tokens = jax.ShapeDtypeStruct((1, 1024), "int32")
options = model.definition.topology.compile_options(mesh, phase="train")
assert options
lowered = jax.jit(jax.value_and_grad(loss), compiler_options=options).lower(params, tokens)
repeated = [r for r in schedule.audit(lowered).reductions if r.collective.executions > 1]
print(json.dumps([[r.status.value, r.count, r.collective.bytes] for r in repeated]))
"""


def run(*command, **place):
    environment = {**os.environ, **targets.ENVIRONMENT}
    pipes = dict(capture_output=True, text=True, timeout=600)
    done = subprocess.run([sys.executable, *command], env=environment, **pipes, **place)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_on_v5p_its_sublayers_reductions_are_hidden():
    """Two forward and two backward in the loops' bodies, and the norm gains' gradients, of a few
    KB.
    """
    found = json.loads(run("-c", PROGRAM, "v5p:2x2x2").splitlines()[-1])
    assert [status for status, count, size in found if size > 1e6] == ["hidden"] * 4, found


def test_the_guides_test_passes(tmp_path):
    (test,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    (tmp_path / "test_own.py").write_text(test)
    words = "-m pytest -q -p no:cacheprovider test_own.py".split()
    assert "1 passed" in run(*words, cwd=tmp_path)
