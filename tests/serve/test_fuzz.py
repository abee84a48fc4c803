"""Hundreds of malformed requests: each gets a reason, none an error of the server's."""

import collections
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.serve.conftest import MODEL, ask

VALID = {
    "/v1/completions": dict(
        model=MODEL,
        prompt="a",
        n=1,
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=1,
        stop="b",
        repetition_penalty=1.2,
        stream=True,
        stream_options={"include_usage": True},
        echo=True,
        user="me",
        best_of=1,
        logit_bias={},
        suffix="",
    ),
    "/v1/chat/completions": dict(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        n=1,
        max_tokens=3,
        tools=[],
        max_completion_tokens=3,
        logprobs=True,
        top_logprobs=0,
        stream=False,
        response_format={"type": "text"},
    ),
}
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, 1e-320, "", "\x00", "\ud800", "none", "user", "text"]),
)  # fmt: skip
KEYS = st.sampled_from(
    [*VALID["/v1/completions"], *VALID["/v1/chat/completions"], "type", "role", "content", "text"]
)
VALUES = st.recursive(
    SCALARS,
    lambda below: (
        st.lists(below, max_size=4) | st.dictionaries(KEYS | st.text(max_size=6), below, max_size=4)
    ),
    max_leaves=8,
)
PATHS = st.sampled_from(list(VALID))
QUIET = hypothesis.settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@st.composite
def objects(draw):
    """A valid request of which parameters are replaced or added, and perhaps one is removed."""
    path = draw(PATHS)
    changed = draw(st.dictionaries(KEYS | st.text(max_size=6), VALUES, min_size=1, max_size=2))
    removed = draw(st.none() | KEYS)
    body = {key: value for key, value in {**VALID[path], **changed}.items() if key != removed}
    return path, json.dumps(body).encode(), {}


@st.composite
def texts(draw):
    """A request of which a part is replaced by any bytes, from none of it to all."""
    path = draw(PATHS)
    body = json.dumps(VALID[path]).encode()
    start = draw(st.integers(0, len(body)))
    end = draw(st.integers(start, len(body)))
    return path, body[:start] + draw(st.binary(max_size=20)) + body[end:], {}


@st.composite
def others(draw):
    """Any path, method, type and bytes."""
    known = st.sampled_from(
        [*VALID, "/", "/health", "/metrics", "/v1/models", "/v1/models/x", "/openapi.json"]
    )
    made_up = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=20).map(
        "/{}".format
    )
    types = [
        "application/json",
        "text/plain",
        "multipart/form-data",
        ";;",
        "application/json; charset=\xff",
    ]
    methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW"]
    more = dict(
        method=draw(st.sampled_from(methods)),
        headers={"Content-Type": draw(st.sampled_from(types))},
    )
    return draw(known | made_up), draw(st.none() | st.binary(max_size=20)), more


@pytest.mark.parametrize("path", VALID)
def test_what_they_are_made_from_is_right(templated, path):
    assert ask(templated.url, path, VALID[path])[0] == 200


@pytest.mark.parametrize(
    "strategy, examples, malformed",
    [
        (objects(), 300, 240),
        (texts(), 400, 300),
        (others(), 200, 150),
    ],
    ids=["objects", "texts", "others"],
)
def test_malformed_requests(templated, strategy, examples, malformed):
    """Those that happen to be right are answered."""
    seen = collections.Counter()

    @hypothesis.given(asked=strategy)
    @hypothesis.settings(QUIET, max_examples=examples)
    def check(asked):
        path, body, more = asked
        status, _, answer = ask(templated.url, path, body, **more)
        assert status < 500, (asked, answer)
        seen[status // 100] += 1
        if status >= 400 and answer:
            error = answer["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"].strip()
            assert "Traceback" not in error["message"]
            assert "\n" not in error["message"]

    check()
    assert seen[4] >= malformed, seen
    assert templated.log().count("\n") == 2, templated.log()
    # Greedy: a sampled text may end by itself.
    status, _, answer = ask(
        templated.url, body=dict(model=MODEL, prompt="a", max_tokens=3, temperature=0)
    )
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 3
