"""A minute that tells whether the package works at all: train, resume, generate, on a mesh."""

import numpy as np
import pytest

import ladder_jax
from ladder_jax import parallel


@pytest.mark.full  # `make test` has each of them elsewhere
def test_train_resume_generate(run_cli, tmp_path):
    (tmp_path / "book.txt").write_text(
        "in the beginning was the word, and the word was short.\n" * 300
    )
    arguments = """
        train tiny model.num_layers=2 train.batch=4 train.sequence=32 train.steps=4 train.warmup_steps=2
        train.checkpoint_every=2 data.path=book.txt run.dir=out mesh.data=2 mesh.tensor=4
    """.split()
    first = run_cli(*arguments, cwd=tmp_path, check_status=0)
    assert "held-out loss" in first.stdout
    assert "resuming" in run_cli(*arguments, cwd=tmp_path, check_status=0).stderr
    asked = "generate", "out", "--prompt", "in the", "--max-new-tokens", "8"
    text = run_cli(*asked, cwd=tmp_path, check_status=0)
    assert text.stdout.startswith("in the")
    assert len(text.stdout) > 8


def test_doctor(prints):
    assert "jax" in prints("doctor")


def test_emulated_ranks_see_each_other():
    """What a choice of tokens does: jax 0.11 refused it under a vmap."""
    config = ladder_jax.preset("tiny", residual="ladder-fresh", ranks=4)
    layout = ladder_jax.nn.define(config, mesh=ladder_jax.make_mesh()).layout
    greatest = lambda x: parallel.all_ranks(x.max(axis=-1), layout.tensor).max(axis=0)
    over = dict(layout=layout, in_dims=("BV",), out_dims="B")
    values = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    found = parallel.on_mesh(parallel.over_ranks(greatest, **over), **over)(values)
    assert np.array_equal(found, values.max(axis=-1))
