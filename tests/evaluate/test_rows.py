"""Results in a file of JSON lines: what a full disk leaves."""

import os
from unittest import mock

import pytest

from ladder_jax.decode.engine.jsonl import carry_out
from ladder_jax.errors import RunFailed
from ladder_jax.files import digest
from tests.refusals import refused


@pytest.mark.parametrize("cut", [os.truncate, mock.Mock(side_effect=OSError(30, "Read-only"))])
def test_a_full_disk_keeps_whole_lines(tmp_path, largest_file, cut):
    """Also one that takes no change of the file any more: the next run cuts it."""
    rows = {index: digest("question", index) for index in range(4)}
    results = [
        {"index": index, "answer": "é" * 20, "score": index, "request": rows[index]}
        for index in range(4)
    ]
    out = tmp_path / "out.jsonl"
    answered = []

    def work(left):
        for row in left:
            answered.append(row)
            yield row, results[row]

    run = lambda: carry_out(rows, work, file=str(out), label="")
    assert run() == results
    whole = out.read_bytes()
    for room in (len(whole) - 1, len(whole) // 2, 3):
        out.unlink()
        largest_file(room)
        holds = "What it holds is whole" if cut is os.truncate else "Its last line may be a part"
        said = f"out.jsonl: File too large. {holds}, and the same command"
        with pytest.raises(RunFailed, match=said), mock.patch.object(os, "truncate", cut):
            run()
        largest_file(None)
        there = out.read_bytes().splitlines(keepends=True)
        kept = [line for line in there if line.endswith(b"\n")]
        assert there == kept or cut is not os.truncate
        assert whole.startswith(b"".join(kept))
        answered.clear()
        assert run() == results
        assert out.read_bytes() == whole
        assert answered == list(range(len(kept), 4))


def test_one_run_at_a_time(tmp_path):
    file = str(tmp_path / "out.jsonl")

    def work(left):
        with refused("out.jsonl: another run is writing to it"):
            carry_out({0: "row"}, lambda left: [(0, {})], file=file, label="")
        yield 0, {}

    assert carry_out({0: "row"}, work, file=file, label="") == [{}]
