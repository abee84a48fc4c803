"""The lease of a run's folder in an object store: one owner, whoever is killed, asleep or without
an answer.
"""

import concurrent.futures
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from ladder_jax.errors import RunFailed, UserError
from ladder_jax.files import absolute
from ladder_jax.train import folder
from tests.remote.conftest import IN_S3


@pytest.fixture
def replace(monkeypatch):
    """Replaces names of `folder`, such as the seconds after which a lease is renewed."""

    def by(**values):
        for name, value in values.items():
            monkeypatch.setattr(folder, name, value)

    return by


def test_a_lock_that_nobody_renews_is_taken_over(away, replace):
    """And if its owner was only asleep, it notices that it has lost the folder."""
    replace(RENEWED=0.1, GIVES_UP=2.0, EXPIRES=3.0)
    name, bucket, said, lost = away.url("leases/two"), away.bucket, [], []
    bucket.put("leases/two/.lock", b'{"owner": "gone 1 2", "renewed": 3}')
    began = time.monotonic()
    asked = len(bucket.requests)
    with folder.locked(absolute(name), say=said.append, lost=lost.append):
        assert time.monotonic() - began > folder.EXPIRES
        assert "waiting 3 s, in case its owner has been killed" in said[0]
        bucket.put("leases/two/.lock", b'{"owner": "another 1 2", "renewed": 0}')
        while not lost and time.monotonic() - began < 120:
            time.sleep(0.01)
    assert lost == [f"another process has taken {name!r} over"]
    assert b"another" in bucket.objects["leases/two/.lock"][1]
    # Each change is one request with a condition, which the store checks; but for one before the
    # lock is removed.
    assert sum(request.startswith("HEAD") for request in bucket.requests[asked:]) <= 1


class Outage:
    """A clock that only waiting moves, and a store that answers no request between two times."""

    def __init__(self, begins, ends):
        self.begins, self.ends = begins, ends
        self.now, self.renewed, self.done = 0.0, 0.0, False

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        """Of the event that ends the lease."""
        time.sleep(0.0001)
        self.now += seconds
        return self.done

    def set(self):
        self.done = True

    def read(self, name):
        return SimpleNamespace(
            result=lambda: SimpleNamespace(value=b"", stamp=SimpleNamespace(generation=b""))
        )

    def write(self, name, content, *, if_equal):
        def result(within=0.0):
            if self.begins <= self.now < self.ends:
                self.now += within
                raise TimeoutError
            self.renewed = self.now
            return SimpleNamespace(generation=b"1")

        return SimpleNamespace(result=result)


def renewed(outage, replace, tmp_path):
    """What the owner of a lease tells in ten minutes of an outage's clock, and when:
    [(line, time)].
    """
    lost = []
    opened = SimpleNamespace(open=lambda spec: SimpleNamespace(result=lambda: outage))
    replace(
        is_remote=lambda where: True,
        kvstore=lambda where: None,
        tensorstore=SimpleNamespace(KvStore=opened),
        time=outage,
        threading=SimpleNamespace(Event=lambda: outage, Thread=threading.Thread),
    )
    with folder.locked(
        tmp_path, say=pytest.fail, lost=lambda line: lost.append((line, outage.now))
    ):
        began = time.monotonic()
        while not lost and outage.now < 600 and time.monotonic() - began < 30:
            time.sleep(0.001)
    return lost


@pytest.mark.parametrize("begins", [0.5, 4, 9.9, 10, 14, 20])
@pytest.mark.parametrize("seconds", [1, 10, 60, 75])
def test_an_outage_of_a_minute_ends_no_run(tmp_path, replace, begins, seconds):
    """Wherever it begins, between two renewals or within one; one that is not answered is the least
    of it.
    """
    outage = Outage(begins, begins + seconds)
    assert renewed(outage, replace, tmp_path) == []
    assert outage.now >= 600


@pytest.mark.parametrize("begins", [4, 10, 14])
def test_an_owner_that_cannot_renew_gives_up_in_time(tmp_path, replace, begins):
    """Before another process may take the folder over, however often it tries."""
    outage = Outage(begins, 10_000)
    (line, when), *_ = renewed(outage, replace, tmp_path)
    assert line == f"the lock of {str(tmp_path)!r} could not be renewed for 100 s"
    assert when - outage.renewed == folder.GIVES_UP < folder.EXPIRES - folder.RENEWED


def test_who_has_lost_the_folder_ends(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    folder.end_process("another process has taken it over")
    assert ended == [RunFailed.status]
    assert capfd.readouterr().err == "ladder-jax: another process has taken it over\n"


@IN_S3
def test_of_several_that_take_over_one_does(away, replace):
    # on a busy machine four threads do not renew within two seconds
    replace(RENEWED=0.5, GIVES_UP=7.0, EXPIRES=8.0)
    bucket, where = away.bucket, away.url("leases/three")
    winners = []
    refused = []
    done = threading.Event()
    bucket.put("leases/three/.lock", b"something else")

    def start():
        try:
            with folder.locked(absolute(where), say=lambda line: None, lost=pytest.fail):
                winners.append(1)
                done.wait(120)
        except UserError as error:
            refused.append(str(error))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        threads = [pool.submit(start) for _ in range(4)]
        while len(refused) < 3 and not all(thread.done() for thread in threads):
            time.sleep(0.01)
        done.set()
    line = f"another process is training in {where!r}, on host {socket.gethostname()}"
    assert (winners, refused) == ([1], [line] * 3)
