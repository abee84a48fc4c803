"""Clients that ask for far too much at once, and web pages from elsewhere: what their neighbours
notice of them.
"""

import concurrent.futures
import statistics
import time

import pytest

from ladder_jax.data.tokenizer import Bytes
from ladder_jax.errors import UserError
from ladder_jax.serve import middleware, server
from tests.serve.conftest import CAPACITY, MODEL, ask

SMALL = dict(model=MODEL, prompt="a", max_tokens=1, temperature=0)
SIZE = 4 * 2**20 - 200
MARKS = "quotes, brackets and braces, and may have"
FULL = {
    "prompts": (b'{"model": "book", "prompt": [%b""]}', b'"",', MARKS),
    "lists": (b'{"model": "book", "prompt": [%b[]]}', b"[],", MARKS),
    "text": (
        b'{"model": "book", "prompt": "%ba"}',
        b"word ",
        "characters are more than the 128 tokens",
    ),
    "tokens": (b'{"model": "book", "prompt": [%b1]}', b"1,", "new ones are more than the 128"),
    "messages": (
        b'{"model": "book", "messages": [%b{"role": "user", "content": ""}]}',
        b'{"role": "user", "content": ""},',
        MARKS,
    ),
    "talk": (
        b'{"model": "book", "messages": [{"role": "user", "content": "%ba"}]}',
        b"word ",
        "characters are more than the 128 tokens",
    ),
}


def full(kind):
    """A body as large as one may be, its path, and what is wrong with it."""
    form, one, message = FULL[kind]
    path = "/v1/chat/completions" if b"messages" in form else "/v1/completions"
    return path, form % (one * (SIZE // len(one))), message


MORE = ["lists", "talk"]  # near to prompts and text


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.full] if k in MORE else []) for k in FULL]
)
def test_large_bodies(templated, kind):
    """Six at a time, and another client has its small answer all the same."""
    path, body, message = full(kind)

    def small():
        begun = time.monotonic()
        assert ask(templated.url, body=SMALL)[0] == 200
        return time.monotonic() - begun

    alone = statistics.median(small() for _ in range(5))
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        large = [threads.submit(ask, templated.url, path, body) for _ in range(6)]
        beside = []
        while not all(one.done() for one in large):
            beside.append(small())
    assert max(beside) < alone + 5, (alone, beside)
    for one in large:
        status, _, answer = one.result()
        assert status == 400 and message in answer["error"]["message"], answer


class Counting:
    """A tokenizer of bytes that tells how often it was asked."""

    def __init__(self, given):
        self._given, self.asked = given, 0

    def __getattr__(self, name):
        return getattr(self._given, name)

    def encode(self, text):
        self.asked += 1
        return self._given.encode(text)


def test_counted_before_they_are_cut(make_engine, serving):
    """Prompts that are too many, and a text that is too long for any tokenizer, never come to
    it.
    """
    tokenizer = Counting(Bytes())
    with serving(make_engine(slots=1), tokenizer=tokenizer) as (_, url):
        for prompt, more, message in (
            (["a"] * 9, {}, "9 prompts, 1 answers each, are not from 1 to 8 in all"),
            ([""] * 20_000, {}, "20000 prompts, 1 answers each, are not from 1 to 8 in all"),
            (["a"] * 4, {"n": 3}, "4 prompts, 3 answers each, are not from 1 to 8 in all"),
            (
                "a" * (64 * CAPACITY + 1),
                {},
                "8193 characters are more than the 128 tokens that this server has room",
            ),
        ):
            status, _, answer = ask(url, body={**SMALL, "prompt": prompt, **more})
            assert status == 400 and answer["error"]["message"].startswith(message), answer
        assert tokenizer.asked == 0
        messages = [{"role": "user", "content": ""}] * 129
        status, _, answer = ask(url, "/v1/chat/completions", {"model": MODEL, "messages": messages})
        assert status == 400 and answer["error"]["message"].startswith("129 messages are more")
        status, _, answer = ask(url, body={**SMALL, "prompt": "a" * (64 * CAPACITY)})
        assert status == 400 and answer["error"]["message"].startswith(
            f"a prompt of {64 * CAPACITY} tokens and 1 new"
        )
        assert tokenizer.asked == 1


FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.2",
    "localhost:port",
    "[::2]",
    "user@localhost",
    "",
    "10.0.0.1",
]
OWN_HOSTS = ["localhost", "LocalHost:1", "localhost.", "127.0.0.1:80", "[::1]", "[::1]:8000"]
FOREIGN_ORIGINS = [
    "http://evil.example",
    "https://evil.example:8000",
    "null",
    "file://",
    "http://localhost.evil.example",
    "chrome-extension://localhost",
    "localhost",
]
OWN_ORIGINS = ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:5"]


def test_pages_from_elsewhere(templated):
    """Their names lead here, their requests say so; the real command, on every path."""
    for path, body in (
        ("/v1/completions", SMALL),
        ("/v1/models", None),
        ("/health", None),
        ("/metrics", None),
    ):
        status, _, answer = ask(templated.url, path, body, headers={"Host": "evil.example"})
        assert status == 421 and answer["error"]["message"] == (
            "Host 'evil.example' is none of this server's names (allowed: 127.0.0.1, [::1], localhost, or an --api-key)"
        )
        assert ask(templated.url, path, body, headers={"Origin": "http://evil.example"})[0] == 403
    for name in FOREIGN_HOSTS:
        assert ask(templated.url, "/v1/models", headers={"Host": name})[0] == 421, name
    for name in OWN_HOSTS:
        assert ask(templated.url, "/v1/models", headers={"Host": name})[0] == 200, name
    for origin in FOREIGN_ORIGINS:
        assert ask(templated.url, "/v1/models", headers={"Origin": origin})[0] == 403, origin
    for origin in OWN_ORIGINS:
        assert ask(templated.url, "/v1/models", headers={"Origin": origin})[0] == 200, origin


def test_names():
    """The name that the server was told is its own, too; with a key, or for other machines, all
    are.
    """
    for host, key, found in (
        ("127.0.0.1", None, {*middleware.LOCAL}),
        ("127.0.0.5", None, {*middleware.LOCAL, "127.0.0.5"}),
        ("LOCALHOST", None, {*middleware.LOCAL}),
        ("127.0.0.1", "sesame", None),
        ("0.0.0.0", None, None),
    ):
        with server.bind(host, 0) as sock:
            assert middleware.own_names(host, sock, key=key) == found, host
    try:
        with server.bind("::1", 0) as sock:
            assert middleware.own_names("::1", sock, key=None) == {*middleware.LOCAL}
    except UserError:
        pytest.skip("no IPv6 here")
