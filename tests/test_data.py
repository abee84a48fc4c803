"""Text and batches."""

import pathlib
import sys
import sysconfig

import grain
import numpy as np
import pytest

from ladder_jax.config import DataConfig, TrainConfig
from ladder_jax.data import dataset
from tests.refusals import refused


def test_the_standard_library_is_on_every_machine():
    content, _ = dataset.read_text(DataConfig(max_bytes=2_000_000))
    assert len(content) == 2_000_000
    assert content.dtype == np.uint8
    first = (pathlib.Path(sysconfig.get_paths()["stdlib"]) / "__future__.py").read_bytes()
    assert first in content.tobytes()


def test_a_folder_is_its_text_files_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first", encoding="utf-8-sig")
    (tmp_path / "sub/c").write_text("third ü")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / ".DS_Store").write_text("hidden")
    assert (
        dataset.read_text(DataConfig(path=tmp_path))[0].tobytes().decode()
        == "first\nsecond\nthird ü"
    )


def test_bigram_entropy():
    rng = np.random.default_rng(0)
    assert dataset.bigram_entropy(np.tile(np.uint8([1, 2, 3]), 1000)) == pytest.approx(0, abs=1e-12)
    uniform = rng.integers(0, 4, 400_000).astype(np.uint8)
    assert dataset.bigram_entropy(uniform) == pytest.approx(np.log(4), abs=1e-3)
    # A chain that stays with probability 0.9: the entropy of that coin.
    chain = np.cumsum(rng.random(400_000) > 0.9).astype(np.uint8) % 2
    coin = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    assert dataset.bigram_entropy(chain) == pytest.approx(coin, abs=5e-3)


def test_epochs_of_neighbouring_seeds_are_independent():
    """Else a study over several epochs would repeat, with the next seed, all orders but one."""
    rows = dataset.windows(np.arange(1001, dtype=np.int32), 10)
    orders = {}
    for seed in (3, 4, 5, 2**32 - 1, 0):
        endless = dataset.shuffled(rows, seed=seed)
        assert len(endless) == sys.maxsize
        for epoch in range(4):
            order = tuple(int(endless[epoch * 100 + index][0]) // 10 for index in range(100))
            assert sorted(order) == list(range(100))
            assert orders.setdefault(order, (seed, epoch)) == (seed, epoch)
        # the order of runs of one epoch, on record
        first = grain.MapDataset.source(rows).shuffle(seed)
        assert all(np.array_equal(endless[index], first[index]) for index in range(100))


@pytest.fixture
def load(tmp_path):
    """Loads 192 bytes, with this fraction held out."""
    (tmp_path / "a").write_bytes(CONTENT)

    def load(fraction):
        config = DataConfig(path=tmp_path / "a", validation_fraction=fraction)
        return dataset.load(config, train=RECIPE, vocab_size=256)

    return load


CONTENT = bytes(range(32, 128)) * 2
RECIPE = TrainConfig(batch=16, sequence=10, evaluation_batches=3)


def test_held_out_text_is_the_end(load):
    """And is evaluated once, where it is short: each of its four rows counts once."""
    data = load(0.25)
    assert data.text.tobytes() == CONTENT[:144]
    (batch,) = dataset.evaluated(data.held_out, data.held_out_rows, config=RECIPE)
    assert batch.tokens[0].tolist() == list(CONTENT[144:155])
    assert batch.predicted.sum(axis=1).tolist() == [10] * 4 + [0] * 12


@pytest.mark.parametrize(
    "fraction, part", [(0.01, "held-out text has 1"), (0.99, "training text has 2")]
)
def test_a_part_that_is_too_short(fraction, part, load):
    with refused(f"the {part} tokens, fewer than train.sequence"):
        load(fraction)


def test_what_is_trained_on_is_said(tmp_path):
    """How many files and bytes, so that a wrong folder is noticed."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("the cat " * 20)
    (tmp_path / "a.png").write_bytes(b"\x89PNG\xff\xfe")
    _, note = dataset.read_text(DataConfig(path=tmp_path))
    assert note.startswith("data: 3 of 4 files of ")
    assert note.endswith(", 482 bytes of text")
    one = str(tmp_path / "0.txt")
    assert (
        dataset.read_text(DataConfig(path=one))[1]
        == f"data: 1 of 1 files of {one}, 160 bytes of text"
    )
    for most, files in ((100, "1 of 4 "), (161, "2 of 4 "), (160, "1 of 4 ")):
        content, note = dataset.read_text(DataConfig(path=tmp_path, max_bytes=most))
        assert files in note
        assert len(content) == most
        assert note.endswith(", as many as data.max_bytes")
    (tmp_path / "3.jsonl").write_text("{}")
    assert "`ladder-jax tokenize`" in dataset.read_text(DataConfig(path=str(tmp_path)))[1]


def test_no_more_is_read_than_trained_on(tmp_path):
    """A file may be larger than the memory. Its text is cut within a character, as it always was."""
    (tmp_path / "text").write_bytes("aéb".encode() * 9 + b"\xff")
    content, note = dataset.read_text(DataConfig(path=tmp_path / "text", max_bytes=10))
    assert content.tobytes() == ("aéb" * 3).encode()[:10]
    assert note.endswith(", as many as data.max_bytes")
