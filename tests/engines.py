"""Engines of a small model."""

import functools

import numpy as np

from ladder_jax.config import DecodeConfig, Loop, Quantize
from ladder_jax.data.tokenizer import Bytes
from ladder_jax.decode import Engine, Generator, Request
from tests import cases

CAPACITY = 64
CHUNK = 5
DECODER = Bytes().to_bytes


@functools.cache
def parts(name="ladder", *, poison=None, num_layers=1, **mesh):
    """A definition, and parameters of which one token's embedding is no number."""
    definition = cases.define(name, num_layers=num_layers, **mesh)
    params = cases.parameters(definition)
    if poison is not None:
        params["embedding"]["table"][poison] = np.nan
    return definition, cases.place(params, definition)


def engine(*, poison=None, tensor=1, decoder=DECODER, **more):
    sizes = {**dict(slots=3, capacity=CAPACITY, chunk=CHUNK), **more}
    return Engine(*parts(poison=poison, tensor=tensor), decoder=decoder, **sizes)


def check_as_alone(
    definition, params, prompts, *, new, loop=Loop.UNROLLED, quantize=Quantize.NONE, **sizes
):
    """Prompts that share an engine get the `new` tokens each that a Generator gives each alone."""
    form = dict(loop=loop, quantize=quantize)
    alone = Generator(definition, params, **form)
    settings = DecodeConfig(max_new_tokens=new)
    expected = [alone.tokens([prompt], config=settings)[0].tolist() for prompt in prompts]
    with Engine(definition, params, **form, **sizes) as served:
        handles = served.submit_all([Request(prompt, max_new_tokens=new) for prompt in prompts])
        assert [list(handle.result().tokens) for handle in handles] == expected
