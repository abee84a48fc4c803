"""The mutants of `make mutants`: each is a program, and differs from the source in one place."""

import ast
import collections

from experiments.mutants import __main__ as command
from experiments.mutants.operators import mutants

SOURCE = '''
LIMIT = 3  # no function's: it stays

def share(total: int, parts: int | None = None, *, rate=0.5) -> int:
    """Not 1 of these words changes."""
    if parts is None or parts <= 0:
        raise ValueError(f"{parts + 1} parts")
    each = [place(index, "é", total=total) for index in range(2)]
    print(each)
    return (total
            + parts) // 2 if not rate else -total
'''


def changed(mutant):
    return SOURCE.encode()[mutant.start : mutant.stop].decode() + " > " + mutant.text


def test_what_is_changed():
    found = mutants("share.py", SOURCE)
    assert {changed(mutant) for mutant in found} == {
        "parts is None or parts <= 0 > (parts is None and parts <= 0)",
        "parts is None > (parts is not None)",
        "parts is None or parts <= 0 > (not (parts is None or parts <= 0))",
        "parts <= 0 > (parts < 0)",
        "0 > 1",
        "total > None",
        "2 > 3",
        "print(each) > pass",
        "total\n            + parts > (total - parts)",
        "(total\n            + parts) // 2 > ((total + parts) * 2)",
        "not rate > (rate)",
        "not rate > (not not rate)",
        "-total > (total)",
    }
    before = ast.dump(ast.parse(SOURCE))
    for mutant in found:
        assert ast.dump(ast.parse(mutant.of(SOURCE))) != before, changed(mutant)
        assert all("def share" not in SOURCE.splitlines()[line - 1] for line in mutant.lines)


def test_the_same_seed_chooses_the_same_and_fewer_are_the_first(monkeypatch, capsys):
    some = command.choose(count=20, seed=3)
    more = command.choose(count=40, seed=3)
    assert some == more[:20]
    assert some != command.choose(count=20, seed=4)
    packages = collections.Counter(mutant.file.split("/")[1] for mutant in more)
    assert set(packages) == set(command.PACKAGES)
    assert max(packages.values()) - min(packages.values()) <= 1
    monkeypatch.setattr("sys.argv", ["mutants", "--list", "--count", "2", "--seed", "3"])
    command.main()
    assert capsys.readouterr().out == "".join(f"{command.difference(one)}\n" for one in more[:2])
