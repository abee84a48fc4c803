"""A request whose logits are no numbers is an error of its own: the server goes on, with the
requests beside it.
"""

import json

import jax.numpy as jnp
import pytest

from tests.serve.conftest import MODEL, ask, metric

POISON = 13  # a carriage return, whose embedding is no number


@pytest.fixture(scope="module")
def url(make_engine, serving):
    engine = make_engine(slots=2)
    embedding = engine._device._params["embedding"]
    embedding["table"] = embedding["table"].at[POISON].set(jnp.nan)
    with serving(engine) as (_, url):
        yield url


def asked(prompt, **more):
    return dict(model=MODEL, prompt=prompt, max_tokens=4, seed=1, **more)


def test_it_is_a_500_with_a_reason(url):
    status, _, body = ask(url, body=asked("\r"))
    error = body["error"]
    assert (status, error["code"], error["type"]) == (500, "no_numbers", "server_error")
    reason = "the model's logits are no numbers (NaN or infinite) after 0 new tokens"
    assert reason in error["message"]
    assert ask(url, body=asked("b"))[0] == 200
    assert metric(url, 'ladder_jax_finished_total{reason="failed"}') >= 1


def test_in_a_stream_it_is_the_last_event(url):
    status, _, text = ask(url, body=asked("\r", temperature=0, stream=True))
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert status == 200
    assert events[-1]["error"]["code"] == "no_numbers"
    assert ask(url, body=asked("b", temperature=0))[0] == 200
