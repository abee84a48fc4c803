"""Processes that agree over jax's coordination service: values, errors, and one that does not
answer.
"""

import json

PATIENCE = 6.0

VOTES = """
from ladder_jax.processes.agreement import Agreement

agreement = Agreement("test", patience=PATIENCE)

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
    agreement.decided("a decision", lambda: [me, "is the first"]),
    agreement.concluded("a sum", me, sum),
    outcome(lambda: agreement.decided("a decision", wrong)),
    fails(None, of=()),
    outcome(lambda: fails(UserError("of one"), of=(1,))),
    outcome(lambda: fails(RunFailed("of all"), of=range(9))),
    outcome(lambda: fails(KeyError("a fault"), of=(1,))),
]
before = time.monotonic()
if me == 1:
    time.sleep(PATIENCE)
else:
    told.append(outcome(lambda: fails(None, of=())))
told.append(time.monotonic() - before)
print(json.dumps(told))
"""


def test_all_hear_the_same(started):
    processes = 3
    running = started(VOTES.replace("PATIENCE", str(PATIENCE)), processes=processes)
    ends = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * processes, ends
    told = [
        json.loads(next(line for line in out.splitlines() if line.startswith("[[")))
        for out, _ in ends
    ]
    for process, (
        decision,
        total,
        wrong,
        through,
        one,
        everyone,
        fault,
        *lost,
        seconds,
    ) in enumerate(told):
        assert (
            decision == [0, "is the first"]
            and total == sum(range(processes))
            and through == "through"
        )
        assert wrong == "UserError: it is wrong" and everyone == "RunFailed: of all"
        assert one == f"UserError: of one (process 1 of {processes})"
        if process == 1:  # its own is a crash with a trace, as ever
            assert fault == "KeyError: 'a fault'" and lost == []
        else:
            assert fault == f"RunFailed: KeyError: 'a fault' (process 1 of {processes})"
            line = (
                f"RunFailed: process 1 of {processes} has not answered within {PATIENCE:g} s: a try"
            )
            assert lost == [line] and seconds < PATIENCE + 1
