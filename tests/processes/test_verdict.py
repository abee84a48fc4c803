"""Who is to blame: judged from the reports of all, at times that are given."""

import dataclasses

from ladder_jax.processes import Timeouts
from ladder_jax.processes.watchdog import End, Members, Report


class Story:
    """Reports of three processes on the hosts a, b and c."""

    def __init__(self, **timeouts):
        self.members = Members(["a", "b", "c"], timeouts=Timeouts(**timeouts), now=0.0)
        self.reports = [Report() for _ in range(3)]

    def heard(self, process, *, now, **changes):
        number = self.reports[process].number + 1
        self.reports[process] = dataclasses.replace(self.reports[process], number=number, **changes)
        self.members.update(process, self.reports[process], now=now)


def test_a_lost_one_goes_before_those_it_brought_down():
    """The first crashes in a collective; the third, which was killed, is found to be silent
    later.
    """
    story = Story(lost=60.0)
    story.heard(2, now=8.0)
    story.heard(0, now=10.0, end=End.CRASHED, how="crashed: connection reset")
    story.heard(1, now=11.0)
    assert story.members.verdict(now=11.0) is None
    for now in (30.0, 60.0, 68.1):
        story.heard(1, now=now)
    verdict = story.members.verdict(now=68.1)
    assert verdict.text == "process 2 of 3 (host c) has not been heard of for 60 s"
    assert verdict.about == (2,)


def test_all_that_are_lost_are_named():
    """A switch fails: two hosts fall silent, not at the very same moment."""
    story = Story(lost=60.0)
    for now in (10.0, 50.0, 65.0):
        story.heard(0, now=now)
    story.heard(1, now=4.0)
    story.heard(2, now=4.5)
    assert story.members.verdict(now=60.0) is None
    verdict = story.members.verdict(now=64.2)
    silent = "has not been heard of for 60 s"
    assert verdict.text == f"process 1 of 3 (host b) {silent}; process 2 of 3 (host c) {silent}"


def test_the_same_report_again_is_no_sign_of_life():
    story = Story(lost=60.0)
    for now in range(0, 62):
        for process in (0, 1):
            story.heard(process, now=float(now))
        story.members.update(2, story.reports[2], now=float(now))
    assert story.members.verdict(now=61.0).about == (2,)


def test_of_crashes_the_first_once_the_others_live():
    story = Story()
    for process, now in ((1, 5.0), (0, 5.2)):
        story.heard(process, now=now, end=End.CRASHED, how="crashed: KeyError")
    assert story.members.verdict(now=5.2) is None
    story.heard(2, now=6.0)
    verdict = story.members.verdict(now=6.0)
    assert verdict.about == (1,)
    assert verdict.text == "process 1 of 3 (host b) crashed: KeyError"


def test_what_has_judged_need_not_be_heard_of_again():
    """It ends; its last report and the crash came in one look at the reports."""
    story = Story()
    story.heard(1, now=5.0, end=End.CRASHED, how="crashed: KeyError")
    story.heard(0, now=5.0)
    story.heard(2, now=7.0)
    assert story.members.verdict(now=7.0) is None
    story.heard(0, now=5.0, judged=True)
    assert story.members.verdict(now=7.0).about == (1,)


def test_a_failure_goes_before_a_crash():
    """Also before one that was heard of first, as here."""
    story = Story()
    story.heard(0, now=5.0, end=End.CRASHED, how="crashed: connection reset")
    story.heard(2, now=6.0, end=End.FAILED, how="ended: the disk is full")
    assert story.members.verdict(now=6.0).text == "process 2 of 3 (host c) ended: the disk is full"


def test_ending_in_order_blames_nobody():
    story = Story(lost=60.0, hang=100.0)
    for process in range(3):
        story.heard(process, now=100.0, heartbeats=9, doing="step 9", end=End.DONE)
    assert story.members.verdict(now=1000.0) is None
    assert story.members.all_done


def test_nobody_gets_on():
    story = Story(hang=8.0)
    for process in range(3):
        story.heard(process, now=1.0, heartbeats=7, doing="step 7")
    assert story.members.verdict(now=9.0) is None
    assert "no process got on for 8 s (all are at: step 7)" in story.members.verdict(now=9.1).text
