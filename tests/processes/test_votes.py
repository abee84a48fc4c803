"""Processes that agree over jax's coordination service: values, errors, and one that does not
answer.
"""

import json

TIMEOUT = 6.0

VOTES = """
from ladder_jax.processes.agreement import Agreement

agreement = Agreement("test", timeout=TIMEOUT)

def outcome(work):
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def wrong():
    raise UserError("it is wrong")

def fails(error, *, of):
    with agreement.together("a try"):
        if me in of:
            raise error
    return "through"

told = [
    agreement.broadcast("a decision", lambda: [me, "is the first"]),
    agreement.gather("all numbers", me),
    outcome(lambda: agreement.broadcast("a decision", wrong)),
    fails(None, of=()),
    outcome(lambda: fails(UserError("of one"), of=(1,))),
    outcome(lambda: fails(RunFailed("of all"), of=range(9))),
    outcome(lambda: fails(KeyError("a fault"), of=(1,))),
]
before = time.monotonic()
if me == 1:
    time.sleep(TIMEOUT)
else:
    told.append(outcome(lambda: fails(None, of=())))
told.append(time.monotonic() - before)
print(json.dumps(told))
"""


def test_all_hear_the_same(started):
    processes = 3
    running = started(VOTES.replace("TIMEOUT", str(TIMEOUT)), processes=processes)
    ends = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * processes, ends
    told = [
        json.loads(next(line for line in out.splitlines() if line.startswith("[[")))
        for out, _ in ends
    ]
    alike = [
        [0, "is the first"],
        list(range(processes)),
        f"UserError: it is wrong (process 0 of {processes})",
        "through",
        f"UserError: of one (process 1 of {processes})",
        f"RunFailed: of all (process 0 of {processes})",
    ]
    fault = f"RunFailed: KeyError: 'a fault' (process 1 of {processes})"
    late = f"RunFailed: process 1 of {processes} has not answered within {TIMEOUT:g} s: a try"
    for process in (0, 2):
        *said, seconds = told[process]
        assert said == [*alike, fault, late]
        assert seconds < 10 * TIMEOUT
    # its own is a crash with a trace, as ever
    assert told[1][:-1] == [*alike, "KeyError: 'a fault'"]
