"""Connections that ask for nothing, or not to the end: they take nobody's place."""

import contextlib
import http.client
import json
import resource
import signal
import socket
import threading
import time

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from ladder_jax.serve import server
from tests.serve.conftest import ask, connected
from tests.serve.test_limits import until

HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Half: "


@contextlib.contextmanager
def half_open(url, number, *, sent=HALF):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connected(url, sent)) for _ in range(number)]


def others_are_answered(url, *, within):
    """In 0.1 s; in ten or thirty seconds where nobody takes the place of who keeps one for
    nothing.
    """
    begun = time.monotonic()
    assert ask(url, "/health", timeout=30)[0] == 200
    assert time.monotonic() - begun < within


def told(answer):
    """The message in the bytes of an answer that is an error."""
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, {hard}))
from ladder_jax.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def running(start):
    """A server that may open few files at first. It must end well, and have nothing to tell."""
    process = start("--api-key", "sesame", python=("-c", LIMITED.format(hard=4096)))
    yield process
    process.ends_well()


def closed_of_half_open(url):
    """How many of 150 such connections are closed; another client is answered at once."""
    with half_open(url, 150) as sockets:
        others_are_answered(url, within=9)
        return sum(map(is_closed, sockets))


def test_half_open(start, running):
    """More of them than the process may open files, and than it may at first; and all at once,
    after it stood still.

    Nobody is told of each that found no open file.
    """
    few = start(python=("-c", LIMITED.format(hard=128)))
    assert 100 < closed_of_half_open(few.url) < 150
    few.popen.send_signal(signal.SIGSTOP)
    with half_open(few.url, 150):
        few.popen.send_signal(signal.SIGCONT)
        others_are_answered(few.url, within=9)
    few.ends_well()
    assert closed_of_half_open(running.url) == 0


def is_closed(sock):
    sock.settimeout(0.002)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


@pytest.fixture(scope="module")
def engine(make_engine):
    engine = make_engine(slots=1)
    engine.warm_up()
    return engine


BODY = b'{"model": "book", "prompt": "a", "max_tokens": 1}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.mark.parametrize(
    "sent", [b"", HALF, POST + b"Content-Length: 9\r\n\r\n"], ids=["nothing", "half", "refused"]
)
def test_what_does_not_come(engine, serving, monkeypatch, sent):
    """However slowly it comes. The last of these goes on with its body after it was refused."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.5)
    with serving(engine, key="sesame") as (_, url), connected(url, sent) as sock:
        begun = time.monotonic()
        answer = b""
        sock.settimeout(0.05)
        while time.monotonic() < begun + 60:
            try:
                answer += (found := sock.recv(4096))
            except TimeoutError:
                found = b"nothing yet"
            except ConnectionError:  # closed while bytes of ours were on their way
                found = b""
            if not found:
                break
            # it has been closed meanwhile, as the next `recv` says
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"a" if sent else b"")
        assert 0.3 < time.monotonic() - begun < 50
        status = answer.split()[1]
        assert status == (b"401" if b"POST" in sent else b"408"), answer
        if status == b"408":
            assert told(answer) == "the request's head did not come within 0.5 seconds"
        assert ask(url, "/health")[0] == 200


def test_malformed_requests(running):
    """No HTTP; or refused before the body is looked at, which then is no HTTP: nothing of it in the
    server's log.
    """
    for noise in (b"\x00\xffnoise\r\n\r\n", b"x" * 100_000, POST + b"Content-Length: -1\r\n\r\n"):
        with connected(running.url, noise) as sock:
            assert sock.recv(4096).startswith(b"HTTP/1.1 400")
    for pause in (0, 0.2):
        with connected(running.url, CHUNKED) as sock:
            time.sleep(pause)
            sock.sendall(b"zz\r\n")
            assert sock.recv(4096)[:10] == b"HTTP/1.1 4"
            while sock.recv(4096):
                pass
        with connected(running.url, CHUNKED + b"zz\r\n") as sock:
            assert sock.recv(4096)[:12] in (b"HTTP/1.1 401", b"HTTP/1.1 400")


def in_chunks_of_one_byte(body):
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body)


def test_a_body_of_very_many_chunks(engine, serving):
    """Each costs what a request's head costs. A few thousand are served."""
    body = BODY + b" " * (8000 - len(BODY))
    with serving(engine) as (_, url):
        with connected(url, CHUNKED + in_chunks_of_one_byte(body) + b"0\r\n\r\n") as sock:
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        with connected(url, CHUNKED + in_chunks_of_one_byte(b" " * 10_001)) as sock:
            answer = b"".join(iter(lambda: sock.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 400")
        assert told(answer) == "the request's body may come in 10000 chunks"
        assert ask(url, "/health")[0] == 200


def test_a_wrong_key_costs_the_others_nothing(engine, serving, monkeypatch):
    """Its body is read in small pieces, and not to its end; meanwhile others are answered."""
    read, data_received = [], H11Protocol.data_received
    monkeypatch.setattr(
        H11Protocol,
        "data_received",
        lambda self, data: [read.append(data), data_received(self, data)],
    )
    flood = in_chunks_of_one_byte(b"a" * 100_000)
    with serving(engine, key="sesame") as (_, url), connected(url, CHUNKED) as sock:

        def send():
            # closed while bytes of ours are on their way
            with contextlib.suppress(ConnectionError):
                for _ in range(20):
                    sock.sendall(flood)

        flooding = threading.Thread(target=send)
        flooding.start()
        while flooding.is_alive():
            others_are_answered(url, within=9)  # 12 s where a body is parsed without a pause
        flooding.join()
        until(lambda: is_closed(sock) or None)
    sizes = [len(data) for data in read]
    assert max(sizes) <= server.READ_BYTES
    assert sum(sizes) < 100_000


@pytest.fixture
def few(monkeypatch):
    """Servers hold four connections, and the system few bytes for each. Gives how many were made,
    and who is there.
    """
    made, lost, bind = [], [], server.bind

    def noting(name, those):
        method = getattr(server.Protocol, name)

        def noted(self, about):
            method(self, about)
            those.append(self)

        monkeypatch.setattr(server.Protocol, name, noted)

    def with_little_room(host, port):
        sock = bind(host, port)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return sock

    noting("connection_made", made)
    noting("connection_lost", lost)
    monkeypatch.setattr(server, "bind", with_little_room)
    monkeypatch.setattr(server, "max_connections", lambda: 4)
    return lambda: (len(made), [connection for connection in made if connection not in lost])


def unread(few, number):
    """Whether so many connections were made, and none of those there are is read from."""
    made, here = few()
    return made == number and all(connection.flow.write_paused for connection in here)


def deaf(url, sent):
    """A client that asks, and never reads."""
    return connected(url, sent, received=2048)


LARGE = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n%b\r\n"
CLOSING = b"Connection: close\r\n"


@pytest.mark.parametrize("end", [b"", CLOSING], ids=["open", "closing"])
def test_clients_that_never_read(engine, serving, few, end):
    """They keep no place: neither in the middle of an answer, nor while their connection is being
    closed.
    """
    with serving(engine) as (_, url), contextlib.ExitStack() as stack:
        for number in range(1, 11):
            stack.enter_context(deaf(url, LARGE % end * 5))
            until(lambda: unread(few, number))
            assert len(few()[1]) <= 4
        others_are_answered(url, within=20)


def test_clients_that_never_read_have_a_time(engine, serving, few, monkeypatch):
    monkeypatch.setattr(server, "READ_SECONDS", 0.3)
    with serving(engine) as (_, url), deaf(url, LARGE % CLOSING * 5):
        until(lambda: unread(few, 1))
        until(lambda: few() == (1, []))


def test_clients_that_read_slowly(engine, serving, few, monkeypatch):
    """They have as long as they go on reading."""
    monkeypatch.setattr(server, "READ_SECONDS", 1.5)
    with serving(engine) as (_, url), deaf(url, LARGE % CLOSING) as sock:
        begun = time.monotonic()
        content = b""
        while part := sock.recv(300):
            content += part
            time.sleep(0.1)
        assert time.monotonic() - begun > 1.5 * server.READ_SECONDS
        assert content.startswith(b"HTTP/1.1 200")
        assert "paths" in json.loads(content.partition(b"\r\n\r\n")[2])


def test_no_message_waits_for_an_acknowledgement(engine, serving, few):
    """A whole answer is two messages, and clients may acknowledge the first 40 ms late."""
    with serving(engine) as (_, url), deaf(url, b""):
        until(lambda: few()[0] == 1)
        (connection,) = few()[1]
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_bodies_that_never_come(engine, serving, few):
    """Heads alone keep no place; who sends a body is answered."""
    head = POST + b"Content-Length: 9\r\n\r\n"
    with serving(engine) as (_, url):
        for _ in range(2):
            with half_open(url, 8, sent=head):
                until(lambda: sum(connection.cycle is not None for connection in few()[1]) == 4)
                others_are_answered(url, within=20)
                assert ask(url, body=json.loads(BODY), timeout=20)[0] == 200


def test_what_has_come_stays(engine, serving, monkeypatch):
    """A slow answer, and a pause between two requests, have their own times."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    decode = engine._device.decode
    monkeypatch.setattr(
        engine._device, "decode", lambda choice: (time.sleep(1.5), decode(choice))[1]
    )
    with serving(engine) as (_, url), connected(url, b"") as sock:
        for pause in (1.5, 0):  # times are looked at every second
            sock.sendall(WHOLE)
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            assert answer.status == 200 and answer.read()  # to its end: it comes in several pieces
            time.sleep(pause)


def test_a_limit(engine, serving, monkeypatch):
    """Who is being answered keeps the connection; of those who wait, the one that has waited
    longest goes.
    """
    monkeypatch.setattr(server, "max_connections", lambda: 4)
    decode, tested = engine._device.decode, threading.Event()
    monkeypatch.setattr(
        engine._device, "decode", lambda choice: (tested.wait(60), decode(choice))[1]
    )
    with serving(engine) as (gate, url), half_open(url, 3, sent=WHOLE) as busy:
        until(lambda: gate.active == 3)
        with half_open(url, 6) as waiting:
            assert ask(url, "/health")[0] == 200
            until(lambda: all(map(is_closed, waiting)))
        tested.set()
        assert all(sock.recv(4096).startswith(b"HTTP/1.1 200") for sock in busy)


def test_the_limit_of_open_files(monkeypatch):
    """(Of 128 files in test_half_open.)"""
    unlimited, limits = 2**63 - 1, []  # macOS; Linux has no such process
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    for soft in (256, unlimited):
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, unlimited))
        assert server.max_connections() == 1024
    assert limits[0][0] > 2048
