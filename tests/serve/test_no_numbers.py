"""A request whose logits are no numbers is an error of its own: the server goes on, with the
requests beside it.
"""

import json

from tests.engines import engine
from tests.serve.conftest import MODEL, ask, metric

POISON = 13  # a carriage return, whose embedding is no number


def test_it_is_a_500_with_a_reason_and_in_a_stream_the_last_event(serving):
    asked = dict(model=MODEL, max_tokens=4, seed=1)
    with serving(engine(poison=POISON, slots=2, max_queue=8)) as (_, url):
        status, _, body = ask(url, body={**asked, "prompt": "\r"})
        error = body["error"]
        assert (status, error["code"], error["type"]) == (500, "no_numbers", "server_error")
        reason = "the model's logits are no numbers (NaN or infinite) after 0 new tokens"
        assert reason in error["message"]
        status, _, text = ask(url, body={**asked, "prompt": "\r", "temperature": 0, "stream": True})
        assert status == 200
        (*_, last) = (line for line in text.splitlines() if line)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "no_numbers"
        assert ask(url, body={**asked, "prompt": "b"})[0] == 200
        assert metric(url, 'ladder_jax_finished_total{reason="failed"}') == 2
