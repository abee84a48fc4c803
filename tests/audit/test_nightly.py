"""`make audit-nightly`: what the newest jax and compilers, in .venv-nightly, schedule, beside what
the release's do.

A count that differs need not be an error of ours: it says which documented figure will change, or
that the reader does not know a form yet. The test shows the difference.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

NIGHTLY = pathlib.Path(__file__).parents[2] / ".venv-nightly/bin/python"
absent = pytest.mark.skipif(not NIGHTLY.exists(), reason="make audit-nightly installs it")
pytestmark = [pytest.mark.audit, pytest.mark.full, absent]

COUNTS = (
    "all_reduces",
    "asynchronous",
    "hidden",
    "merged",
    "exposed",
    "all_to_alls",
    "all_to_alls_hidden",
)
LLAMA = "--model llama-3-70b --layers 4"
EXPERTS = "--model qwen3-30b-a3b --layers 4 --sequence-parallel --experts exchange"
HALVES = "--phase train --residual standard --interleave 2 --batch 2 --prompt-length 2048"
PROGRAMS = [
    f"{LLAMA} --phase prefill --residual standard --target v5p:2x2x2",
    f"{LLAMA} --phase prefill --residual ladder --target v5p:2x2x2",
    f"{LLAMA} --phase prefill --residual ladder --target v5e:2x4",
    f"{LLAMA} --phase prefill --residual ladder --target h100:8",
    f"{LLAMA} --phase decode --residual ladder --target v6e:2x4",
    f"{LLAMA} --phase train --residual ladder --fsdp 2 --target v5p:2x2x2",
    f"{LLAMA} {HALVES} --target v5e:2x4",
    f"{LLAMA} {HALVES} --target h100:8",
    f"{EXPERTS} --phase prefill --residual ladder-2 --target v5p:2x2x2",
]


def counts(python, words, cache):
    command = [python, "-m", "ladder_jax", "overlap", *words.split(), "--json"]
    environment = {**os.environ, "LADDER_JAX_CACHE": str(cache)}
    result = json.loads(subprocess.check_output(command, env=environment, timeout=1200))
    return {key: result.get(key) for key in COUNTS}, f"jax {result['jax']}, {result['compiler']}"


@pytest.mark.parametrize("words", PROGRAMS)
def test_counts_are_those_of_the_release(words, tmp_path):
    before, release = counts(sys.executable, words, tmp_path)
    now, nightly = counts(NIGHTLY, words, tmp_path)
    assert release != nightly, "the nightly environment has the release's compilers"
    assert now == before, f"ladder-jax overlap {words}\n{release}: {before}\n{nightly}: {now}"
