"""Text and batches."""

import pathlib
import sys
import sysconfig

import grain
import numpy as np
import pytest

from ladder_jax.config import DataConfig, RunConfig, TrainConfig
from ladder_jax.data import batches, dataset
from ladder_jax.train import folder


def test_the_standard_library_is_on_every_machine():
    content = dataset.read_text(DataConfig(max_bytes=2_000_000)).content
    assert len(content) == 2_000_000 and content.dtype == np.uint8
    first = (pathlib.Path(sysconfig.get_paths()["stdlib"]) / "__future__.py").read_bytes()
    assert first in content.tobytes()


def test_a_folder_is_its_text_files_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "sub" / "c").write_text("third ü")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    assert dataset.read_text(DataConfig(path=str(tmp_path))).content.tobytes().decode() == "first\nsecond\nthird ü"


def test_bigram_entropy():
    rng = np.random.default_rng(0)
    assert dataset.bigram_entropy(np.tile(np.uint8([1, 2, 3]), 1000)) == pytest.approx(0, abs=1e-12)
    uniform = rng.integers(0, 4, 400_000).astype(np.uint8)
    assert dataset.bigram_entropy(uniform) == pytest.approx(np.log(4), abs=1e-3)
    # A chain that stays with probability 0.9: the entropy of that coin.
    chain = np.cumsum(rng.random(400_000) > 0.9).astype(np.uint8) % 2
    coin = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    assert dataset.bigram_entropy(chain) == pytest.approx(coin, abs=5e-3)


def test_batches_are_a_function_of_seed_and_step():
    content = np.arange(1001).astype(np.uint8)
    config = TrainConfig(batch=5, sequence=10, seed=3)
    dataset = batches.training(content, config=config)
    assert dataset[0].shape == (5, 11) and dataset[0].dtype == np.int32
    np.testing.assert_array_equal(dataset[7], batches.training(content, config=config)[7])
    other = batches.training(content, config=TrainConfig(batch=5, sequence=10, seed=4))
    assert not np.array_equal(other[0], dataset[0])
    # 100 windows of 10 predicted tokens: 20 batches see each once, and the next epoch another order.
    epoch = np.concatenate([dataset[step] for step in range(20)])
    starts = np.arange(100) * 10
    expected = {tuple(content[s : s + 11].tolist()) for s in starts}
    assert {tuple(row.tolist()) for row in epoch} == expected
    assert not np.array_equal(dataset[20], dataset[0])


def test_epochs_of_neighbouring_seeds_are_independent():
    """Else a study over several epochs would repeat, with the next seed, all orders but one."""
    rows = batches.Windows(np.arange(1001, dtype=np.int32), 10)
    orders = {}
    for seed in (3, 4, 5, 2**32 - 1, 0):
        endless = batches.shuffled(rows, seed=seed)
        assert len(endless) == sys.maxsize
        for epoch in range(4):
            order = tuple(int(endless[epoch * 100 + index][0]) // 10 for index in range(100))
            assert sorted(order) == list(range(100))
            assert orders.setdefault(order, (seed, epoch)) == (seed, epoch)
        first = grain.MapDataset.source(rows).shuffle(seed)  # the order of runs of one epoch, on record
        assert all(np.array_equal(endless[index], first[index]) for index in range(100))


def test_held_out_text_is_the_end():
    content = np.arange(200).astype(np.uint8)
    head, tail = batches.split(content, config=DataConfig(validation_fraction=0.25))
    assert len(head) == 150 and tail[0] == 150
    (batch,) = batches.held_out(tail, config=TrainConfig(batch=16, sequence=10, evaluation_batches=3))
    np.testing.assert_array_equal(batch[0], np.arange(150, 161))


def test_what_is_trained_on_is_said(tmp_path):
    """How many files and bytes, so that a wrong folder is noticed."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("the cat " * 20)
    (tmp_path / "a.png").write_bytes(b"\x89PNG\xff\xfe")
    read = dataset.read_text(DataConfig(path=str(tmp_path)))
    assert read.summary("p") == "data: 3 files of p, 482 bytes of text; left out, as they are not UTF-8 text: 1"
    one = dataset.read_text(DataConfig(path=str(tmp_path / "0.txt")))
    assert one.summary("p") == "data: 1 file of p, 160 bytes of text"
    for most, files in ((100, 1), (161, 2), (160, 1)):
        cut = dataset.read_text(DataConfig(path=str(tmp_path), max_bytes=most))
        assert (cut.files, len(cut.content), cut.cut) == (files, most, True)
        assert cut.summary("p").endswith("; the rest is left out by data.max_bytes")


def test_a_warm_up_longer_than_the_run_is_said():
    notices = lambda **train: folder.notices(RunConfig(train=TrainConfig(**train)))
    assert notices(steps=300, warmup_steps=300) == []
    assert notices(steps=300, warmup_steps=2000) == [
        "notice: train.warmup_steps=2000 is more than train.steps=300,"
        " so the learning rate does not reach train.learning_rate"
    ]
