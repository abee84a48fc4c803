"""The command as a user meets it: signals, exit statuses, one line for a mistake."""

import contextlib
import itertools
import signal
import sys
from concurrent import futures

import pytest

from tests.serve.conftest import ask, metric, official, refusal
from tests.serve.test_limits import LONG, until

# The command, with rounds that take long enough to be met, and may fail.
SCRIPT = """
import sys, time
from ladder_jax.cli import main
from ladder_jax.decode.engine.slots import Slots
decode, rounds = Slots.decode, 0
def slow(self, *choice):
    global rounds
    rounds += 1
    time.sleep(0.15)
    if {failing} and rounds > 8:  # some are those of the warm-up
        raise MemoryError("no more of it")
    return decode(self, *choice)
Slots.decode = slow
sys.exit(main())
"""
SLOW, FAILING = (("-c", SCRIPT.format(failing=failing)) for failing in (False, True))


@contextlib.contextmanager
def streamed(url, **more):
    """The parts of LONG's answer, of which the first has come."""
    with official(url, "sesame") as client:
        parts = client.completions.create(**{**LONG, **more}, stream=True)
        yield itertools.chain([next(parts)], parts)


def test_sigterm_drains(start):
    """What runs is finished; what comes is refused; the status is 0. And the options do what they
    say.
    """
    options = "--model-name novel --max-new-tokens 120 --slots 2 --quantize int8 --tensor 1 --host 0.0.0.0 --chunk 4"
    options = options.split()
    process = start(*options, python=SLOW, LADDER_JAX_API_KEY="sesame")
    compiling, ready = process.log().splitlines()
    assert compiling == "ladder-jax: compiling the programs for 2 slots of 128 tokens"
    assert ready.startswith("ladder-jax: serving 'novel' at http://0.0.0.0:")
    assert "(2 slots of 128 tokens)" in ready
    assert ask(process.url, body=LONG)[0] == 401
    with streamed(process.url, model="novel", max_tokens=120) as stream:
        process.popen.send_signal(signal.SIGTERM)
        key = {"Authorization": "Bearer sesame"}
        while (found := ask(process.url, "/health"))[0] == 200:
            pass
        assert found[2] == {"status": "draining"}
        status, headers, answer = ask(process.url, body={**LONG, "model": "novel"}, headers=key)
        assert status == 503
        assert answer["error"]["code"] == "draining"
        assert headers["Retry-After"]
        assert process.popen.wait(60) == 0
        parts = list(stream)
    assert parts[-1].choices[0].finish_reason == "length"
    assert len(parts) > 2 * 120 / 16  # --chunk 4: not in pieces of 16
    assert process.log().splitlines()[2:] == [
        "ladder-jax: in progress: 1, for 30 seconds at most; a second signal ends the server at once"
    ]


def test_draining_has_an_end(start, openai):
    """Whole answers become 503, streams end with an error. And a server that anybody may use says
    so.
    """
    # so that LONG takes 127 rounds
    process = start(*"--drain-seconds 0.1 --host 0.0.0.0 --chunk 1".split(), python=SLOW)
    assert "anybody who reaches http://0.0.0.0:" in process.log().splitlines()[0]
    with streamed(process.url) as stream, futures.ThreadPoolExecutor() as threads:
        whole = threads.submit(ask, process.url, body=LONG)
        until(lambda: metric(process.url, "ladder_jax_running") == 2)
        assert process.end() == 0
        assert whole.result()[0] == 503
        with pytest.raises(openai.APIError, match="the server ended before the answer did"):
            list(stream)
    assert process.log().count("\n") == 4


def test_a_second_signal_ends_it_at_once(start):
    process = start("--chunk", "1", python=SLOW)
    with streamed(process.url) as stream:
        process.popen.send_signal(signal.SIGINT)
        while ask(process.url, "/health")[0] == 200:
            pass
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(60) == -signal.SIGTERM
        with pytest.raises(
            Exception, match="peer|Connection error"
        ):  # of the client or of its HTTP library
            list(stream)


def test_an_error_in_the_engine_ends_the_process(start, openai):
    """Those who wait are told, and the status is not 0."""
    process = start("--chunk", "1", python=FAILING)  # as above: one program
    with streamed(process.url, max_tokens=120) as stream:
        said = 500, "the engine has failed, and the server ends"
        assert refusal(process.url, body=LONG) == said
        assert process.popen.wait(60) == 1
        with pytest.raises(openai.APIError, match="the engine has failed"):
            list(stream)
    assert "MemoryError: no more of it" in process.log()
    assert "RuntimeError: the engine failed" in process.log()


MISTAKES = {
    ("--capacity", "1"): "capacity must be at least 2, not 1",
    ("--drain-seconds", "-1"): "--drain-seconds must be finite and not negative, not -1.0",
    ("--drain-seconds", "nan"): "--drain-seconds must be finite and not negative, not nan",
    ("--port", "70000"): "a port is from 0 to 65535, not 70000",
    ("--host", "no such host"): "cannot listen at no such host, port 0: ",
    ("--host", "a..b"): "cannot listen at a..b, port 0: ",
    ("--capacity", "2000000000"): "a cache of 8 x 2,000,000,000 tokens needs",
    ("--api-key", ""): "the API key must be printable ASCII characters without spaces",
}


@pytest.mark.parametrize("args", MISTAKES, ids=" ".join)
def test_mistakes(folder, mistake, args):
    assert MISTAKES[args] in mistake("serve", folder, "--port", "0", *args)


def test_without_the_extra(folder, mistake, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert (
        mistake("serve", folder)
        == "ladder-jax: serve needs uvicorn: pip install 'ladder-jax[serve]'\n"
    )
