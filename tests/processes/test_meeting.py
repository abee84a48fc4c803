"""Who is missing, who is one too many, and what else may stand at the port."""

import json
import socket
import threading
import time

import pytest

from ladder_jax.errors import RunFailed, UserError
from ladder_jax.processes import Patience, Place, rendezvous


def meet(port, process, *, processes, job="a", start=3.0, results=None):
    """One process's way to the meeting; what it gets or is told goes into `results`."""
    place, patience = Place(f"localhost:{port}", processes, process), Patience(start=start, lost=2.0)
    try:
        if process == 0:
            come = rendezvous.gather(place, job=job, patience=patience, host="host-0", say=lambda line: None)
            results[process] = {other: host for other, (host, _) in come.items()}
            links = [link for _, link in come.values()]
        else:
            link, results[process] = rendezvous.join(place, job=job, patience=patience, host=f"host-{process}")
            links = [link]
    except (RunFailed, UserError) as error:
        results[process] = error
        return
    for link in links:
        link.close()


def all_meet(port, calls):
    results = {}
    threads = [threading.Thread(target=meet, args=(port,), kwargs={**call, "results": results}) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def test_all_come(port):
    results = all_meet(port, [dict(process=i, processes=4) for i in (3, 1, 2, 0)])
    assert results[0] == {1: "host-1", 2: "host-2", 3: "host-3"}
    assert results[1] == results[2] == results[3] == ["host-0", "host-1", "host-2", "host-3"]
    with socket.create_server(("", port)):  # jax's coordinator finds its port free
        pass


def test_the_missing_are_named_everywhere(port):
    results = all_meet(port, [dict(process=i, processes=4, start=1.0 if i == 0 else 5.0) for i in (0, 2)])
    assert isinstance(results[0], RunFailed) and isinstance(results[2], RunFailed)
    for error in results.values():
        assert "processes 1, 3 of 4 have not come within 1 s (here: 0 on host-0, 2 on host-2)" in str(error)
    assert "--start-timeout" in str(results[0])


def test_nobody_listens(port):
    (error,) = all_meet(port, [dict(process=1, processes=2, start=1.0)]).values()
    assert isinstance(error, RunFailed)
    assert f"process 0 of 2 (localhost:{port}) has not been met within 1 s (Connection refused)" in str(error)


@pytest.mark.parametrize(
    "other, why",
    [
        (dict(process=1, processes=3), "host-1 was told of 3 processes, process 0 (host host-0) of 2"),
        (dict(process=1, processes=2, job="b"), "process 1 of 2 (host host-1) was given other settings"),
    ],
)
def test_of_another_run(port, other, why):
    results = all_meet(port, [dict(process=0, processes=2), other])
    assert isinstance(results[0], UserError) and why in str(results[0]) and why in str(results[1])


def test_two_of_one_number(port):
    results = {}
    first = threading.Thread(target=meet, args=(port, 1), kwargs=dict(processes=3, results={}, start=2.0))
    second = threading.Thread(target=meet, args=(port, 1), kwargs=dict(processes=3, results={}, start=2.0))
    first.start()
    second.start()
    meet(port, 0, processes=3, results=results)
    first.join()
    second.join()
    assert "there are two with the number 1 of 3: on the hosts host-1 and host-1" in str(results[0])


def test_strangers_do_no_harm(port):
    """A port scanner, a browser, and one who says nothing."""
    results = {}
    waiting = threading.Thread(target=meet, args=(port, 0), kwargs=dict(processes=2, results=results, start=10.0))
    waiting.start()
    strangers = []
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b"\x00" * 2**21, b'{"hello": '):
        for _ in range(100):
            try:
                strangers.append(socket.create_connection(("localhost", port)))
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        try:
            strangers[-1].sendall(said)
        except OSError:  # already thrown out
            pass
    meet(port, 1, processes=2, results=results, start=10.0)
    waiting.join(15)
    for stranger in strangers:
        stranger.close()
    assert results[0] == {1: "host-1"} and results[1] == ["host-0", "host-1"]


def test_another_server_at_the_port(port):
    """A web server answers in its own way, and is not taken for process 0."""
    with socket.create_server(("localhost", port)) as server:

        def answer():
            try:
                while True:
                    connected = server.accept()[0]
                    connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connected.close()
            except OSError:
                return

        threading.Thread(target=answer, daemon=True).start()
        (error,) = all_meet(port, [dict(process=1, processes=2, start=1.0)]).values()
        assert isinstance(error, RunFailed) and "has not been met within 1 s" in str(error)
        server.shutdown(socket.SHUT_RDWR)


def test_port_is_taken(port):
    with socket.create_server(("", port)):
        (error,) = all_meet(port, [dict(process=0, processes=2)]).values()
    assert isinstance(error, UserError) and f"cannot listen on port {port}" in str(error)


def test_one_goes_away_and_comes_back(port):
    """It was killed while it waited, and is started again."""
    results = {}
    meeting = threading.Thread(target=meet, args=(port, 0), kwargs=dict(processes=3, results=results, start=10.0))
    meeting.start()
    for _ in range(100):
        try:
            with socket.create_connection(("localhost", port)) as early:
                early.sendall(json.dumps({"hello": 1, "processes": 3, "job": "a", "host": "early"}).encode() + b"\n")
                time.sleep(0.5)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    time.sleep(0.5)
    rest = [threading.Thread(target=meet, args=(port, i), kwargs=dict(processes=3, results=results)) for i in (1, 2)]
    for thread in rest:
        thread.start()
    for thread in (*rest, meeting):
        thread.join(15)
    assert results[0] == {1: "host-1", 2: "host-2"}
