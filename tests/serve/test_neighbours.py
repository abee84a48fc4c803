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
from tests.serve.conftest import MODEL, ask, refusal

SMALL = dict(model=MODEL, prompt="a", max_tokens=1, temperature=0)
SIZE = 4 * 2**20 - 200
FULL = {
    "prompts": (b'{"model": "book", "prompt": [%b""]}', b'"",', "prompts, 1 answers each, are not"),
    "text": (
        b'{"model": "book", "prompt": "%ba"}',
        b"word ",
        "new ones are more than the 128",
    ),
    "tokens": (b'{"model": "book", "prompt": [%b1]}', b"1,", "new ones are more than the 128"),
    "messages": (
        b'{"model": "book", "messages": [%b{"role": "user", "content": ""}]}',
        b'{"role": "user", "content": ""},',
        "new ones are more than the 128",
    ),
}


def full(kind):
    """A body as large as one may be, its path, and what is wrong with it."""
    form, one, message = FULL[kind]
    path = "/v1/chat/completions" if b"messages" in form else "/v1/completions"
    return path, form % (one * (SIZE // len(one))), message


@pytest.mark.parametrize("kind", FULL)
def test_large_bodies(templated, kind):
    """Six at a time, and another client has its small answer all the same."""
    path, body, message = full(kind)

    def small():
        begun = time.monotonic()
        assert ask(templated.url, body=SMALL)[0] == 200
        return time.monotonic() - begun

    alone = statistics.median(small() for _ in range(5))
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        large = [threads.submit(refusal, templated.url, path, body) for _ in range(6)]
        beside = []
        while not all(one.done() for one in large):
            beside.append(small())
    assert max(beside) < alone + 5, (alone, beside)
    for one in large:
        status, said = one.result()
        assert status == 400 and message in said, said


def test_counted_before_they_are_cut(make_engine, serving):
    """Prompts that are too many never come to the tokenizer."""
    cut = []

    class Counting(Bytes):
        def encode(self, text):
            cut.append(text)
            return super().encode(text)

    with serving(make_engine(slots=1), tokenizer=Counting()) as (_, url):
        for path, body, message in (
            ("completions", {"prompt": ["a"] * 9}, "9 prompts, 1 answers each, are not from 1 to"),
            ("completions", {"prompt": ["a"] * 4, "n": 3}, "4 prompts, 3 answers each, are not"),
        ):
            status, said = refusal(url, f"/v1/{path}", {"model": MODEL, "max_tokens": 1, **body})
            assert status == 400 and said.startswith(message), said
        assert not cut


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
        status, said = refusal(templated.url, path, body, headers={"Host": "evil.example"})
        assert status == 421
        assert said == (
            "Host 'evil.example' is none of this server's names (allowed: 127.0.0.1, [::1], localhost, or an --api-key)"
        )
        assert ask(templated.url, path, body, headers={"Origin": "http://evil.example"})[0] == 403
    for header, names, status in (
        ("Host", FOREIGN_HOSTS, 421),
        ("Host", OWN_HOSTS, 200),
        ("Origin", FOREIGN_ORIGINS, 403),
        ("Origin", OWN_ORIGINS, 200),
    ):
        for name in names:
            assert ask(templated.url, "/v1/models", headers={header: name})[0] == status, name


def test_names():
    """The name that the server was told is its own, too; with a key, or for other machines, all
    are.
    """
    local = {*middleware.LOCAL}
    for host, key, found in (
        ("127.0.0.1", None, local),
        ("127.0.0.5", None, {*local, "127.0.0.5"}),
        ("LOCALHOST", None, local),
        ("127.0.0.1", "sesame", None),
        ("0.0.0.0", None, None),
    ):
        with server.bind(host, 0) as sock:
            assert middleware.own_names(host, sock, key=key) == found, host
    try:
        with server.bind("::1", 0) as sock:
            assert middleware.own_names("::1", sock, key=None) == local
    except UserError:
        pytest.skip("no IPv6 here")
