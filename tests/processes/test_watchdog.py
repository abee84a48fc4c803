"""Real processes, stopped, killed and failing: all end with a status that is not 0, and a line that
names the cause.
"""

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
import types

import pytest

from ladder_jax.errors import UserError
from ladder_jax.processes import watchdog
from ladder_jax.processes.watchdog import GO_ON, REPORTS, End, Report, Watchdog
from tests.processes.conftest import ends, joined

HOST = os.uname().nodename
SLEEP = 'heartbeat("step 1")\ntime.sleep(600)'


def test_stuck_process_is_named(started):
    """A stopped process is like a host without power: it is silent. Once it goes on, it ends too.

    Here process 0, which judges all others; another is silent in test_training.
    """
    stuck, other = started(SLEEP, timeouts={"lost": 5})
    joined([stuck, other])
    stuck.send_signal(signal.SIGSTOP)
    silent = f"process 0 of 2 (host {HOST}) has not been heard of for 5 s"
    assert ends([other], status=1) == [f"ladder-jax: {silent}: {GO_ON}\n"]
    stuck.send_signal(signal.SIGCONT)
    ends([stuck])
    assert stuck.returncode not in (0, None)


def test_killed_process_0_ends_all(started):
    """The store goes with it: at once, and jax may be the first to say so, with an abort."""
    running = started(SLEEP)
    joined(running)
    running[0].kill()
    _, said = ends(running)
    assert running[1].returncode in (1, -signal.SIGABRT)
    assert f"process 0 of 2 (host {HOST}) is gone: {GO_ON}" in said or "leader task" in said


def test_process_that_does_not_get_on_is_named(started):
    """It gives signs of life, but never makes step 3, for which the other waits."""
    body = """
    for step in range(1, 3 if me == 1 else 4):
        heartbeat(f"step {step}")
    time.sleep(600)
    """
    for said in ends(started(body, timeouts={"hang": 6}), status=1):
        assert (
            f"process 1 of 2 (host {HOST}) hangs at: step 2; the others have waited for it at: step 3"
            in said
        )
        assert "for 6 s (--hang-timeout waits longer)" in said
        assert said.count("\n") == 1


def test_one_fails_and_its_partner_crashes(started):
    """The disk of the second is full; the first then crashes, and is not to blame."""
    body = """
    heartbeat("step 1")
    if me == 1:
        raise RunFailed("the disk is full")
    from jax._src import distributed
    while not any('"failed"' in report for _, report in distributed.global_state.client.key_value_dir_get({reports!r})):
        time.sleep(0.01)
    raise ValueError("all-reduce failed: connection reset by peer")
    """.format(reports=f"{REPORTS}/")
    first, second = ends(started(body), status=1)
    assert second == "ladder-jax: the disk is full\n"
    assert first == f"ladder-jax: process 1 of 2 (host {HOST}) ended: the disk is full: {GO_ON}\n"


def test_bug_shows_its_traceback_once(started):
    running = started(
        "if me == 1:\n    raise KeyError('a bug')\ntime.sleep(600)", timeouts={"lost": 10}
    )
    first, second = ends(running, status=1)
    assert second.count("Traceback") == 1
    for said in (first, second):
        assert (
            said.splitlines()[-1]
            == f"ladder-jax: process 1 of 2 (host {HOST}) crashed: KeyError: 'a bug': {GO_ON}"
        )
    assert first.count("\n") == 1


def test_mistake_of_the_users(started):
    running = started("raise UserError('train.batch must be positive')")
    assert ends(running, status=2) == ["ladder-jax: train.batch must be positive\n"] * 2


def test_all_finish_or_stop(started):
    """The first waits for the slower second; a status after a signal is that of `Stopped`."""
    body = """
    heartbeat("step 1")
    time.sleep(me)
    raise Stopped("SIGTERM: step 18 is saved", signum=signal.SIGTERM)
    """
    assert ends(started(body), status=143) == ["ladder-jax: SIGTERM: step 18 is saved\n"] * 2


class Store(dict):
    """jax's, in this process."""

    def key_value_set(self, key, value, *, allow_overwrite):
        self[key] = value

    def key_value_dir_get(self, prefix):
        return list(self.items())


RARE = types.SimpleNamespace(lost=600.0, hang=600.0, interval=300.0)


@contextlib.contextmanager
def beside(**report):
    """Process 0 of two, whose partner soon writes this report; it must end at once, however rare
    the signs of life are.
    """
    store = Store()
    text = json.dumps(dataclasses.asdict(Report(1, **report)))
    other = threading.Timer(0.5, store.update, [{f"{REPORTS}/1": text}])
    began = time.monotonic()
    with Watchdog(store, process=0, hosts=["a", "b"], timeouts=RARE).watching():
        other.start()
        yield
    assert time.monotonic() - began < RARE.interval


def test_the_end_of_the_others_is_noticed_at_once():
    with beside(end=End.DONE):
        pass


@pytest.mark.parametrize("report", [dict(end=End.FAILED), dict(judged=True)], ids=str)
def test_a_failure_that_all_know_ends_at_once(report, monkeypatch, capfd):
    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(watchdog, "SETTLE", 0.1)
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended, beside(**report):
        raise UserError("train.batch must be positive")
    assert ended.value.code == 2
    assert time.monotonic() - began < RARE.interval
    assert capfd.readouterr().err == "ladder-jax: train.batch must be positive\n"
