"""Clients that leave, ask for too much or may not ask; servers that end. All in this process."""

import contextlib
import json
import socket
import threading
import time

import pytest

from ladder_jax.serve import middleware, server
from tests.refusals import refused
from tests.serve.conftest import CAPACITY, MODEL, ask, connected, metric, official, refusal

LONG = dict(model=MODEL, prompt="a", max_tokens=CAPACITY - 1, temperature=0)
ROUNDS = 8  # of LONG


@pytest.fixture(scope="module")
def engine(make_engine):
    """One slot, and room for two to wait."""
    engine = make_engine(slots=1, max_queue=2)
    engine.warm_up()
    return engine


@pytest.fixture
def rounds(engine, monkeypatch):
    """A round waits for `rounds.release()`, or for the engine's end: so a test meets a request
    while it runs.
    """
    rounds, decode = threading.Semaphore(0), engine._device.decode

    def later(choice):
        while not (rounds.acquire(timeout=0.01) or engine._stopping):
            pass
        return decode(choice)

    monkeypatch.setattr(engine._device, "decode", later)
    return rounds


def until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def raw(url, body=b"", *, head=None):
    """A socket on which a request was sent."""
    head = head or f"Content-Length: {len(body)}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{head}"
    return connected(url, f"{head}\r\n\r\n".encode() + body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(engine, rounds, serving, stream):
    """The one with the slot, and one that waits; the next is served at once, and right."""
    body = json.dumps({**LONG, "stream": stream}).encode()
    cancelled = lambda: engine.stats().finished["cancelled"]
    with serving(engine) as (gate, url):
        before = cancelled()
        with raw(url, body) as first, contextlib.ExitStack() as second:
            until(lambda: engine.stats().running == 1)
            second.enter_context(raw(url, body))
            until(lambda: engine.stats().queued == 1)
            if stream:
                rounds.release()
                answer = bytearray()
                until(lambda: answer.extend(first.recv(4096)) or b"data: " in answer)
        # The one with the slot is marked, and counted when a round begins: before this, or later.
        marked = lambda: sum(handle.cancelled for _, handle in engine._in_slots())
        until(lambda: cancelled() + marked() == before + 2)
        rounds.release(ROUNDS)
        until(lambda: not engine.busy and cancelled() == before + 2)
        assert ask(url, body={**LONG, "max_tokens": 2})[0] == 200
        until(lambda: not gate.active)
        if not stream:
            assert 'path="/v1/completions",status="499"} 2.0' in ask(url, "/metrics")[2]


def test_a_full_queue(engine, rounds, serving):
    """Refused with a time to wait; of several prompts all or none."""
    with serving(engine) as (_, url), contextlib.ExitStack() as sockets:
        body = json.dumps(LONG).encode()
        for _ in range(2):
            sockets.enter_context(raw(url, body))
        until(lambda: (engine.stats().running, engine.stats().queued) == (1, 1))
        status, headers, answer = ask(url, body={**LONG, "prompt": ["a", "b"]})
        assert status == 429
        assert int(headers["Retry-After"]) > 0
        error = answer["error"]
        assert error["message"] == "no room for 2 more in the queue of 2 requests: 1 wait"
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert metric(url, "ladder_jax_queued") == engine.stats().queued == 1
        sockets.enter_context(raw(url, body))
        until(lambda: engine.stats().queued == 2)
        assert ask(url, body={**LONG, "stream": True})[0] == 429


def test_an_error_in_the_engine(make_engine, serving, monkeypatch):
    """Everyone who waits, and everyone who comes, is told."""
    engine = make_engine(slots=1)
    monkeypatch.setattr(engine._device, "decode", lambda choice: 1 / 0)
    with serving(engine) as (_, url):
        assert ask(url, "/health")[0] == 200
        for _ in range(2):
            status, _, answer = ask(url, body=LONG)
            assert status == 500
            assert answer["error"]["code"] == "engine_failed"
        assert ask(url, "/health")[::2] == (503, {"status": "failed"})
        assert isinstance(engine.error, ZeroDivisionError)


def test_a_key(engine, serving, openai):
    key = "sesame-7"
    with serving(engine, key=key) as (_, url):
        for path, body, wrong in (
            ("/v1/completions", LONG, {}),
            ("/v1/completions", LONG, {"Authorization": "Bearer sesame"}),
            ("/v1/models", None, {"Authorization": key}),
            ("/metrics", None, {"Authorization": "Basic " + key}),
            ("/none", None, {"Authorization": b"Bearer \xff\xfe"}),
        ):
            status, headers, answer = ask(url, path, body, headers=wrong)
            assert status == 401, path
            assert answer["error"]["code"] == "invalid_api_key"
            assert headers["WWW-Authenticate"] == "Bearer"
            assert key not in json.dumps(answer)
        assert ask(url, "/health")[0] == 200
        assert ask(url, "/v1/models", headers={"authorization": f"bearer {key}"})[0] == 200
        with official(url, "other") as client:
            with pytest.raises(openai.AuthenticationError, match="wrong API key"):
                client.models.list()


def test_bodies_that_are_too_large(engine, serving, monkeypatch):
    monkeypatch.setattr(middleware, "BODY_BYTES", 1000)
    with serving(engine) as (_, url):
        for size in (1001, 3000, 10**6):
            said = 413, "the request's body may have 1000 bytes"
            assert refusal(url, body=b" " * size) == said
        assert ask(url, body=b" " * 1000)[0] == 400
        chunks = b"400\r\n" + b" " * 1024 + b"\r\n0\r\n\r\n"
        with raw(url, chunks, head="Transfer-Encoding: chunked") as sock:
            assert b" 413 " in sock.recv(4096).splitlines()[0]
        assert not engine.busy


def test_bodies_that_are_too_slow(engine, serving, monkeypatch):
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.3)
    with serving(engine) as (_, url):
        with raw(url, b"{", head="Content-Length: 9") as sock:
            assert b" 408 " in sock.recv(4096).splitlines()[0]
        with raw(url, b"{", head="Content-Length: 9"):
            pass  # leaves in the middle of it
        assert ask(url, "/health")[0] == 200
        assert not engine.busy


WRONG = {
    b"": "the body is not JSON: EOF while parsing a value at line 1 column 0",
    b"[]": "the body must be a JSON object",
    b'{"model": "book", "prompt": "a"': "the body is not JSON: EOF while parsing an object at line 1 column 31",
    b'{"model": "book", "prompt": "\xff"}': "the body is not JSON: invalid unicode code point",
    b"[" * 200_000: "the body is not JSON: recursion limit exceeded",
    b'{"n": ' + b"9" * 5000 + b"}": "the body is not JSON: number out of range",
    b'{"model": "book", "prompt": "\\ud800"}': "the body is not JSON: unexpected end of hex escape",
    b'{"model": "book", "prompt": "a", "temperature": NaN}': "temperature: Input should be a finite number",
    b'{"model": "book", "prompt": "a", "max_tokens": true}': "max_tokens: Input should be a valid integer",
    b'{"model": "book"}': "prompt: Field required",
    b'{"model": "%b", "prompt": "a"}' % (b"m" * 10**6): "there is no model 'mmmm",
    b'{"model": "book", "prompt": "a", "%b": 1}' % (b"top_" * 10**6): "unknown parameter 'top_top_",
    b'{"model": "book", "prompt": [%b"a"]}' % (b"1," * 10**6): "prompt must be a string, a list of",
    b'{"model": "book", "prompt": [%b1]}'
    % (b"1," * 10**6): "a prompt of 1000001 tokens and 1 new ones",
}


@pytest.fixture(scope="module")
def url(engine, serving):
    with serving(engine) as (_, url):
        yield url


@pytest.mark.parametrize("body", WRONG, ids=lambda body: repr(body[:40]))
def test_wrong_bodies(url, body):
    status, said = refusal(url, body=body)
    assert status == (404 if b'"mmmm' in body else 400), said
    assert said.startswith(WRONG[body])
    assert len(said) < 1010


def test_wrong_paths_methods_and_types(url):
    status, said = refusal(url, "/v1/completion", LONG)
    assert status == 404
    assert "did you mean '/v1/completions'?" in said
    status, headers, answer = ask(url, "/v1/completions")
    assert (status, headers["Allow"]) == (405, "POST")
    assert answer["error"]["message"] == "GET is not for /v1/completions (allowed: POST)"
    status, headers, _ = ask(url, "/health", LONG)
    assert (status, headers["Allow"]) == (405, "GET")
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, said = refusal(url, body=LONG, headers={"Content-Type": kind})
        assert status == 415
        assert said.endswith("its Content-Type application/json")
    assert (
        ask(
            url,
            body={**LONG, "max_tokens": 1},
            headers={"Content-Type": "application/JSON; charset=utf-8"},
        )[0]
        == 200
    )


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with refused("cannot listen at 127.0.0.1, port [0-9]+: "):
            server.bind("127.0.0.1", taken.getsockname()[1])
    with refused("cannot listen at 192.0.2.1, port 0: "):
        server.bind("192.0.2.1", 0)
