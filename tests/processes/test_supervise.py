"""Real parents and workers, killed, stopped and misled: the others end within the timeout, with one line that says why.

The workers use no jax, so that a process takes a fraction of a second; with jax they are those of test_training.
"""

import os
import pathlib
import signal
import time

import pytest

from ladder_jax.processes.supervise import GO_ON

SLEEP = """
worker.beat("step 1")
print("at work", me, os.getpid(), flush=True)
time.sleep(600)
"""


def ends(running, *, within=15.0):
    """What each printed on standard error, once all have ended."""
    until = time.monotonic() + within
    return [process.communicate(timeout=max(0.1, until - time.monotonic()))[1] for process in running]


def at_work(running):
    """The workers' process ids, once all have printed them."""
    return [int(process.stdout.readline().split()[3]) for process in running]


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_all_finish(started):
    running = started("worker.beat('step 1')\nprint('done', me)", processes=4)
    assert ends(running) == [""] * 4
    assert [process.returncode for process in running] == [0] * 4


@pytest.mark.parametrize("victim", [0, 1])
def test_worker_is_killed(started, victim):
    running = started(SLEEP, processes=3)
    pids = at_work(running)
    os.kill(pids[victim], signal.SIGKILL)
    for index, said in enumerate(ends(running)):
        name = f"process {victim} of 3" + ("" if index == victim else f" (host {os.uname().nodename})")
        assert said == f"ladder-jax: {name} was ended by SIGKILL (out of memory?): {GO_ON}\n"
        assert running[index].returncode == 1 and not alive(pids[index])


@pytest.mark.parametrize("victim", [0, 2])
def test_parent_is_killed(started, victim):
    running = started(SLEEP, processes=3)
    pids = at_work(running)
    running[victim].kill()
    said = ends(running)
    for index in {0, 1, 2} - {victim}:
        assert f"process {victim} of 3 (host {os.uname().nodename}) is gone" in said[index]
        assert said[index].count("\n") == 1 and running[index].returncode == 1
    assert not any(map(alive, pids))  # nobody is left behind, not even the worker without a parent


@pytest.mark.parametrize("victim", [0, 1])
def test_host_that_falls_silent(started, victim):
    """A stopped parent is like a host without power: its connection stays, and nothing comes."""
    running = started(SLEEP, processes=3, patience={"lost": 2})
    at_work(running)
    running[victim].send_signal(signal.SIGSTOP)
    rest = [process for process in running if process is not running[victim]]
    for said in ends(rest, within=10):
        assert f"process {victim} of 3 (host {os.uname().nodename}) has not been heard of for 2 s: {GO_ON}" in said
    assert [process.returncode for process in rest] == [1, 1]


def test_hang_is_named(started):
    """The second never makes step 3; the others wait for it in a collective."""
    body = """
    for step in range(1, 3 if me == 1 else 4):
        worker.beat(f"step {step}")
    time.sleep(600)
    """
    running = started(body, processes=3, patience={"hang": 2})
    for said in ends(running, within=10):
        assert f"process 1 of 3 (host {os.uname().nodename}) hangs at: step 2; the others have waited" in said
        assert "at: step 3, for 2 s (--hang-timeout waits longer)" in said and said.count("\n") == 1
    assert [process.returncode for process in running] == [1] * 3


def test_nobody_gets_on(started):
    running = started("worker.beat('step 7')\ntime.sleep(600)", patience={"hang": 8})
    for said in ends(running, within=30):
        assert "no process got on for 8 s (all are at: step 7)" in said


def test_one_fails_and_brings_others_down(started, tmp_path):
    """The disk of the third is full; the others then crash, in Python and in native code, and are not to blame."""
    failed = tmp_path / "failed"
    body = f"""
    worker.beat("step 1")
    if me == 2:
        open({str(failed)!r}, "w").close()
        raise RunFailed("the disk is full")
    while not os.path.exists({str(failed)!r}):
        time.sleep(0.01)
    time.sleep(0.5)
    if me == 1:
        raise ValueError("all-reduce failed: connection reset by peer")
    os.write(2, b"E1122 01:03:03.06 4626 coordination_service_agent.cc:288] Polled an error\\n")
    os.write(2, b"F1122 01:03:03.06 4626 client.h:86] Terminating\\n*** Check failure stack trace: ***\\n    @ 0x7f\\n")
    os.abort()
    """
    running = started(body, processes=3)
    said = ends(running)
    assert said[2] == "ladder-jax: the disk is full\n"
    for text in said[:2]:
        assert text == f"ladder-jax: process 2 of 3 (host {os.uname().nodename}) ended: the disk is full: {GO_ON}\n"
    assert [process.returncode for process in running] == [1] * 3


def test_bug_shows_its_traceback_once(started):
    """Nobody else is the cause, so what was held back is shown, where it happened."""
    body = """
    if me == 1:
        os.write(2, b"F1122 01:03:03.06 4626 gpu.cc:86] out of registers\\n")
        raise KeyError("a bug")
    time.sleep(600)
    """
    first, second = ends(running := started(body))
    assert "Traceback" in second and "out of registers" in second
    assert "Traceback" not in first and "process 1 of 2" in first and "crashed: KeyError: 'a bug'" in first
    assert [process.returncode for process in running] == [1, 1]


def test_mistake_of_the_users(started):
    running = started("raise UserError('train.batch must be positive')")
    for said in ends(running):
        assert "train.batch must be positive" in said and "Traceback" not in said
    assert 2 in [process.returncode for process in running]


STOPPABLE = """
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
worker.beat("step 1")
print("at work", me, os.getpid(), flush=True)
while not stop:
    time.sleep(0.05)
raise Stopped("SIGTERM: step 18 is saved", signum=signal.SIGTERM)
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_preemption(started, sent):
    """The signal goes to the worker once, whose last line and status are the parent's."""
    running = started(STOPPABLE)
    at_work(running)
    for process in running:
        process.send_signal(sent)
    for said in ends(running):
        assert said == f"{sent.name}: saving, then ending (once more: at once)\nladder-jax: SIGTERM: step 18 is saved\n"
    assert [process.returncode for process in running] == [128 + sent] * 2


def test_second_signal_ends_at_once(started):
    running = started("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP)
    at_work(running)
    for _ in range(2):
        running[0].send_signal(signal.SIGTERM)
        time.sleep(0.5)
    first, second = ends(running)
    assert running[0].returncode == 143 and "nothing saved since the last checkpoint" in first
    assert running[1].returncode == 1 and "process 0 of 2" in second and "was ended by SIGTERM" in second


def test_native_prints_pass(started):
    """But not gloo's greeting, which every process has."""
    body = """
    print("from Python")
    os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks.\\n")
    os.write(2, b"W1122 01:03:03.06 4626 cuda.cc:12] slow\\nno newline")
    """
    running = started(body, processes=2)
    for process in running:
        out, err = process.communicate(timeout=15)
        assert out == "from Python\n" and err == "W1122 01:03:03.06 4626 cuda.cc:12] slow\nno newline\n"
