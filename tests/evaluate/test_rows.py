"""Results in a file of JSON lines: what a full disk leaves."""

import pytest

from ladder_jax.decode.engine.jsonl import carry_out
from ladder_jax.errors import RunFailed
from ladder_jax.files import digest
from tests.refusals import refused


def test_a_full_disk_keeps_whole_lines(tmp_path, largest_file):
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
        with pytest.raises(
            RunFailed,
            match="out.jsonl: File too large. What it holds is whole, and the same command",
        ):
            run()
        largest_file(None)
        kept = out.read_bytes().splitlines(keepends=True)
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
