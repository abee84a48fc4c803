"""A checkpoint of random weights, and servers of it: in processes of their own, and in this one."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import urllib.parse

import pytest

from ladder_jax.config import FolderConfig
from ladder_jax.data.tokenizer import Bytes
from ladder_jax.decode.engine import Request
from ladder_jax.pretrained import open_model
from ladder_jax.serve import app, server
from ladder_jax.serve.prepare import Terms
from tests import cases, starts
from tests.changed import ROOT

CAPACITY = 128
MODEL = "book"


@pytest.fixture(scope="session")
def openai():
    """The module, which takes a second: not in each worker that collects the tests."""
    import openai

    return openai


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A run's folder with one checkpoint: one layer, bytes."""
    folder = tmp_path_factory.mktemp("serve")
    definition = cases.define("ladder", tensor=2, num_layers=1, vocab_size=256)
    starts.save(folder / "checkpoints", definition, run=FolderConfig(name=MODEL))
    return folder


@pytest.fixture(scope="module")
def make_engine(folder):
    """Engines of that checkpoint in this process."""

    def make(**more):
        settings = {**dict(tensor=1, slots=4, capacity=CAPACITY, max_queue=8), **more}
        return open_model(folder).engine(**settings, decoder=Bytes().to_bytes)

    return make


@pytest.fixture(scope="module")
def alone(make_engine):
    """A request's result where nothing else runs, on one device."""
    engine = make_engine(slots=1)
    known = {}

    def result(prompt, **settings):
        prompt = prompt if isinstance(prompt, list) else list(prompt.encode())
        request = Request(prompt, **settings)
        if request not in known:
            known[request] = engine.submit(request).result()
        return known[request]

    return result


@pytest.fixture(scope="module")
def serving():
    """Serves an engine of this process while inside; gives the gate and its address."""

    @contextlib.contextmanager
    def within(engine, *, tokenizer=None, key=None, max_new_tokens=CAPACITY - 1):
        sizes = dict(
            capacity=engine.capacity, max_queue=engine.max_queue, max_new_tokens=max_new_tokens
        )
        terms = Terms(MODEL, tokenizer or Bytes(), 256, chat_tokens=max_new_tokens, **sizes)
        gate = app.create(app.Service(engine, terms), key=key)
        with server.listening(gate, sock := server.bind("127.0.0.1", 0)), engine:
            yield gate, server.url(sock)

    return within


class Process:
    """`ladder-jax serve` as a user starts it; ready once it exists."""

    def __init__(self, *args, log, python=("-m", "ladder_jax"), **environment):
        self._log = open(log, "w+b")
        self.popen = subprocess.Popen(
            [
                sys.executable,
                *python,
                "serve",
                *map(str, args),
                "--port",
                "0",
                "--capacity",
                str(CAPACITY),
            ],
            stderr=self._log,
            env={**os.environ, **environment},
            cwd=ROOT,
        )
        while "serving" not in self.log():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(0.1)
                raise AssertionError(self.log())
        self.url = self.log().rpartition(" at ")[2].split()[0]

    def log(self):
        """Its standard error so far."""
        with open(self._log.name, encoding="utf-8") as file:
            return file.read()

    def end(self, timeout=60):
        """Its exit status, after SIGTERM."""
        self.popen.terminate()
        return self.popen.wait(timeout)

    def ends_well(self):
        """At SIGTERM, with nothing to tell but that it compiled and serves."""
        assert self.end() == 0
        assert self.log().count("\n") == 2, self.log()[:2000]

    def kill(self):
        self.popen.kill()
        self.popen.wait()
        self._log.close()


@pytest.fixture(scope="session")
def start(folder, tmp_path_factory):
    """Starts servers of the checkpoint; none outlives the tests."""
    started = []

    def make(*args, **more):
        started.append(
            Process(folder, *args, log=tmp_path_factory.mktemp("log") / "stderr", **more)
        )
        return started[-1]

    yield make
    for process in started:
        process.kill()


@pytest.fixture(scope="session")
def templated(start):
    """A server that can chat, too. Whatever it is asked, it must end well, and have nothing to
    tell.
    """
    process = start(python=("-m", "tests.serve.templated"))
    yield process
    process.ends_well()


@contextlib.contextmanager
def connected(url, sent, *, received=None):
    """A socket on which bytes were sent. received: bytes that the system holds for it."""
    parts = urllib.parse.urlsplit(url)
    with socket.socket() as sock:
        sock.settimeout(20)
        if received:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
        sock.connect((parts.hostname, parts.port))
        sock.sendall(sent)
        yield sock


def official(url, key="any"):
    """The official client of a server."""
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def ask(url, path="/v1/completions", body=None, *, method=None, headers=None, timeout=60):
    """Status, headers and body of one plain request; the body is JSON where it says so."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    is_json = content and response.headers.get("Content-Type") == "application/json"
    return response.status, response.headers, json.loads(content) if is_json else content.decode()


def refusal(*asked, **how):
    """The status and the message of a request that is refused."""
    status, _, answer = ask(*asked, **how)
    return status, answer["error"]["message"]


def metric(url, name):
    """One value of /metrics."""
    lines = ask(url, "/metrics")[2].splitlines()
    (line,) = [line for line in lines if line.startswith(name + " ") or line.startswith(name + "{")]
    return float(line.rpartition(" ")[2])
