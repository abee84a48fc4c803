"""A gradient step that a user writes around the model, for absent hardware: it lowers, and hides as ours do."""

import json
import os
import subprocess
import sys

import pytest

from ladder_jax.schedule import targets

pytestmark = pytest.mark.audit

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
    command = [sys.executable, "-c", PROGRAM, target, str(LAYERS), "compile" if compiles else "lower"]
    done = subprocess.run(
        command, env={**os.environ, **targets.ENVIRONMENT}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("target", ["v5e:2x4", "v6e:2x4", "h100:8"])
def test_it_lowers(target):
    if reason := targets.not_installed(targets.parse(target)):
        pytest.skip(reason)
    reductions(target, compiles=False)


def test_on_v5p_its_sublayers_reductions_are_hidden():
    """Two forward and two backward in the loops' bodies; beside them the norm gains' gradients, of a few KB."""
    found = reductions("v5p:2x2x2", compiles=True)
    assert [status for status, count, size in found if size > 1e6] == ["hidden"] * 4, found
