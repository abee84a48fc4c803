"""Who is to blame: judged from what process 0 hears, at times that are given."""

from ladder_jax.processes import Patience, Place
from ladder_jax.processes.members import SETTLE, Cause, End, Members
from ladder_jax.processes.noise import Noise

PLACE = Place("a:1", 3, 0)
CRASH = End(Cause.CRASHED, "crashed: connection reset", 1)


def members(**patience):
    return Members(["a", "b", "c"], place=PLACE, patience=Patience(**patience), now=0.0)


def test_a_lost_one_goes_before_those_it_brought_down():
    team = members()
    team.ended(0, CRASH, now=10.0)  # heard first
    team.ended(2, End(Cause.LOST, "was ended by SIGKILL", 1), now=10.0 + SETTLE / 2)
    assert team.verdict(now=10.0 + SETTLE / 2) is None  # more may come
    verdict = team.verdict(now=10.0 + SETTLE)
    assert verdict.text == "process 2 of 3 (host c) was ended by SIGKILL" and verdict.about == (2,)


def test_all_that_are_lost_are_named():
    """A switch fails: two hosts fall silent, not at the very same moment."""
    team = members(lost=60.0)
    for now in (10.0, 50.0, 65.0):
        team.heard(0, beats=1, doing="step 1", now=now)
    team.heard(1, beats=1, doing="step 1", now=4.0)
    team.heard(2, beats=1, doing="step 1", now=4.5)
    assert team.verdict(now=60.0) is None
    verdict = team.verdict(now=65.0)
    silent = "has not been heard of for 60 s"
    assert verdict.text == f"process 1 of 3 (host b) {silent}; process 2 of 3 (host c) {silent}"


def test_of_crashes_the_first():
    team = members()
    for process, now in ((1, 5.0), (0, 5.2), (2, 5.1)):
        team.ended(process, CRASH, now=now)
    assert team.verdict(now=5.2).about == (1,)


def test_ending_in_order_blames_nobody():
    team = members(lost=60.0)
    for process in range(3):
        team.heard(process, beats=9, doing="step 9", now=100.0)
        team.ended(process, End(Cause.DONE, "finished", 0), now=100.0)
        team.ended(process, End(Cause.LOST, "is gone", 1), now=101.0)  # its connection, after that
    assert team.verdict(now=1000.0) is None and team.all_ended


def test_beats_of_a_process_that_does_not_get_on():
    team = members(hang=100.0, lost=60.0)
    for now in range(0, 161, 20):
        for process in range(3):
            beats = min(now // 20 + 1, 2 if process == 1 else 3)
            team.heard(process, beats=beats, doing=f"step {beats}", now=float(now))
        verdict = team.verdict(now=float(now))
        assert (verdict is not None) == (now == 160)
    assert verdict.about == (1,) and "process 1 of 3 (host b) hangs at: step 2; the others" in verdict.text


def test_noise_in_pieces():
    """Native prints arrive cut anywhere."""
    error = "E1122 01:03:03.06 46 coordination_service.cc:1] error\nits second line\n"
    text = f"hello\n{error}W1122 01:03:03.06 46 a.cc:1] slow\n"
    for size in (1, 3, 7, 1000):
        noise = Noise()
        shown = "".join(noise.passed(text[i : i + size]) for i in range(0, len(text), size))
        assert shown == "hello\nW1122 01:03:03.06 46 a.cc:1] slow\n"
        assert noise.held == error
