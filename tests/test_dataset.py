"""Token stores as rows to train on: epochs, shares, mixtures, and runs that stop and go on."""

import collections
import itertools
import json
import shutil
import time
import types

import jax
import numpy as np
import pytest

from ladder_jax.checkpoint import open_checkpoint
from ladder_jax.config import DataConfig, TrainConfig
from ladder_jax.data import dataset, tokenizer
from ladder_jax.data.dataset import DataLoader, stacked
from ladder_jax.data.store import Store
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.parallel import make_mesh
from ladder_jax.train import timing
from tests import runs, tokenizers
from tests.lines import write
from tests.refusals import refused
from tests.runs import losses
from tests.test_tokens import lines, make

RECIPE = TrainConfig(batch=4, sequence=16, seed=3)


def store(folder, documents, *, tokens="bytes"):
    """Of documents given as strings."""
    folder.mkdir()
    (folder / "lines.jsonl").write_text(lines(documents))
    make([folder / "lines.jsonl"], folder / "store", most=300, tokens=tokens)
    return folder / "store"


def numbered(count, *, letter="a"):
    """Documents that name themselves throughout: "a7,a7,a7"."""
    rng = np.random.default_rng(count)
    times = [int(rng.integers(1, 13)) for _ in range(count)]
    return [",".join([f"{letter}{index}"] * often) for index, often in enumerate(times)]


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    documents = numbered(150)
    return store(tmp_path_factory.mktemp("book") / "s", documents), documents


def load(path, *, recipe=RECIPE, **more):
    return dataset.load(DataConfig(path=path, **more), train=recipe, vocab_size=400)


def pieces(row):
    """Each piece of a document in a row, as text."""
    for segment in range(1, row.segments.max() + 1):
        yield bytes(row.tokens[row.segments == segment].tolist()).decode()


def predicted(found):
    """How often each (token before, token) pair is predicted, by the text of the piece, its first
    token apart.
    """
    return collections.Counter(pair for piece in found for pair in itertools.pairwise(piece))


def test_two_epochs_hold_every_document_twice(book):
    path, documents = book
    data = load(path)
    opened = Store(path)
    cut = int(
        np.searchsorted(opened.starts, opened.manifest.tokens - int(opened.manifest.tokens * 0.05))
    )
    assert len(opened.starts) - 1 == len(documents)
    assert 130 < cut < 150
    length = data.training_rows
    epochs = [
        [data.training[index] for index in range(start, start + length)] for start in (0, length)
    ]
    texts = lambda rows: [piece for row in rows for piece in pieces(row)]
    for epoch in epochs:
        found = texts(epoch)
        assert predicted(found) == predicted(documents[:cut])
        assert {one for one in documents[:cut] if len(one) <= 17} <= set(found)
    first, second = ([row.tokens.tobytes() for row in epoch] for epoch in epochs)
    assert first != second
    assert sorted(first) == sorted(second)
    rest = [data.held_out[index] for index in range(data.held_out_rows)]
    assert predicted(texts(rest)) == predicted(documents[cut:])


def test_a_process_reads_its_devices_rows(book, monkeypatch):
    """And nobody reads what is another's: here of two processes with four devices each."""
    mesh = make_mesh(data=4, tensor=2)
    indices = list(jax.NamedSharding(mesh, jax.P("data")).devices_indices_map((4, 17)).items())
    read, plain = [], Store.read
    monkeypatch.setattr(Store, "read", lambda self, *args: read.append(args) or plain(self, *args))
    rows = load(book[0]).training
    whole = stacked(rows, range(20, 24)).tokens
    everything = sorted(read)
    read.clear()
    for part in (0, 1):
        mine = dict(indices[4 * part : 4 * part + 4])
        own = types.SimpleNamespace(addressable_devices_indices_map=lambda shape, of=mine: of)
        found = DataLoader(rows, config=RECIPE, sharding=own).read(5)
        assert np.array_equal(found.tokens, whole[2 * part : 2 * part + 2])
    assert sorted(read) == everything


def test_a_mixture_is_by_weight_and_each_store_whole(book, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    store(tmp_path / "b", numbered(60, letter="b"))
    (tmp_path / "mix.yaml").write_text(f"mixture:\n  {book[0]}: 3\n  ~/b/store: 1\n")
    data = load(tmp_path / "mix.yaml")
    alone = load(book[0])
    rows = [data.training[index] for index in range(400)]
    letters = ["".join({chr(token) for token in row.tokens} & set("ab")) for row in rows]
    assert collections.Counter(letters) == {"a": 300, "b": 100}
    # The first store's rows come in the order that they have alone; so both have whole epochs.
    mine = [row.tokens.tobytes() for row, letter in zip(rows, letters) if letter == "a"]
    assert mine == [alone.training[index].tokens.tobytes() for index in range(300)]
    assert data.fingerprint != alone.fingerprint
    # of three held-out rows of one store, the fourth of a batch repeats the first, and does not count
    (batch,) = dataset.evaluated(data.held_out, 3, config=RECIPE)
    assert batch.predicted.any(axis=1).tolist() == [True, True, True, False]
    assert data.held_out_rows >= RECIPE.batch  # a mixture's repeat by weight


@pytest.mark.parametrize(
    "content, message",
    {
        "mixture: 3": "must hold one section 'mixture:'",
        "stores: {a: 1}": "must hold one section 'mixture:'",
        "mixture: {a: 1, ./a: 2}": "names './a' twice",
        "mixture: {a: 0}": "the weight of 'a' must be a number above 0, .*, not 0",
        "mixture: {a: much}": "the weight of 'a' must be a number above 0, .*, not 'much'",
        "mixture: {a: true}": "the weight of 'a' must be a number above 0, .*, not True",
        "mixture: {a: 1.0e-320}": "number above 0, from 1e-12 to 1e\\+12, not 1e-320",
        f"mixture: {{a: {'9' * 400}}}": "must be a number above 0, .*, not 9999",
        "mixture:\n  a: 7\n  a: 3": "is not YAML: 'a' stands there twice, again in line 3",
        "mixture: [": "is not YAML",
        "mixture: {nowhere: 1}": "there is no token store at .*nowhere",
    }.items(),
)
def test_mixtures_that_are_wrong(tmp_path, content, message):
    (tmp_path / "m.yaml").write_text(content)
    with refused(message):
        load(tmp_path / "m.yaml")


def test_stores_that_cannot_be_used(book, tmp_path):
    folder = tokenizers.folder(tmp_path / "t")
    words = store(tmp_path / "words", numbered(9), tokens=folder)
    assert (
        load(words).tokenizer.name
        == tokenizer.load(folder).name
        == load(words, tokenizer=folder).tokenizer.name
    )
    with refused("is of bytes, not of data.tokenizer="):
        load(book[0], tokenizer=folder)
    (tmp_path / "m.yaml").write_text(f"mixture:\n  {book[0]}: 1\n  words/store: 1\n")
    with refused("a mixture has one tokenizer: .* is of bytes, .* of tokenizer-"):
        load(tmp_path / "m.yaml")
    with refused("has one document"):
        load(store(tmp_path / "one", ["a"]))
    for name, documents in {"training": ["a", "b", "longer"], "held-out": ["longer", "a"]}.items():
        with refused(f"the {name} documents .* none has one to predict"):
            load(store(tmp_path / name, documents))
    with refused(r"model.vocab_size=256 is too small for tokenizer-\w+ \(at least 301\)"):
        run(words, tmp_path / "run")
    unfinished = json.loads((words / "manifest.json").read_text()) | {"shards": []}
    (words / "manifest.json").write_text(json.dumps(unfinished))
    with refused("is not finished: run its `ladder-jax tokenize` again"):
        load(words)


def run(data, directory, *more):
    sizes = "train.steps=10 train.sequence=16 train.checkpoint_every=4 mesh.data=2 mesh.tensor=2"
    return runs.run(data, directory, *sizes.split(), *more)


@pytest.fixture(scope="module")
def uninterrupted(book, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "run"
    result = run(book[0], directory)
    assert result.bigram_entropy is None
    return directory, result


def test_a_data_file_that_cannot_be_read_in_the_middle_of_a_run(
    book, uninterrupted, tmp_path, monkeypatch
):
    """One clear line; what was computed is saved, and mended, the run ends as if nothing had
    been.
    """
    directory = tmp_path / "run"

    def read(self, step, *, plain=DataLoader.read):
        if step == 6:
            raise UserError("00000.tokens is damaged")
        return plain(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(DataLoader, "read", read)
        said = "the batch of step 7 cannot be read: 00000.tokens is damaged; step 6 is saved"
        with pytest.raises(RunFailed, match=said) as caught:
            run(book[0], directory)
    assert "\n" not in str(caught.value)
    assert open_checkpoint(directory).step == 6
    assert [step for step, *_ in losses(directory)] == [1, 2, 3, 4, 5, 6]
    assert run(book[0], directory) == uninterrupted[1]
    assert losses(directory) == losses(uninterrupted[0])


def test_other_data_is_refused_when_a_run_is_resumed(book, uninterrupted, tmp_path):
    data = tmp_path / "s/store"
    store(tmp_path / "s", book[1])  # the same documents: the same fingerprint
    directory = shutil.copytree(uninterrupted[0], tmp_path / "run")
    stored = json.loads((directory / "config.json").read_text())
    stored["data"]["path"] = str(data)
    (directory / "config.json").write_text(json.dumps(stored))
    assert run(data, directory) == uninterrupted[1]
    shutil.rmtree(tmp_path / "s")
    store(tmp_path / "s", [*book[1][:-1], "x"])
    with refused(r"has changed since step 10 \(its fingerprint was \w+, now \w+\)"):
        run(data, directory)


def test_a_dated_template_on_another_day(tmp_path, monkeypatch):
    """The rows are those of the day on which the run began, so that it goes on as if nothing had
    been.
    """
    folder = tokenizers.folder(
        tmp_path / "t", template="{{ strftime_now('%d') }}" + tokenizers.TEMPLATE
    )
    data = tmp_path / "chats.jsonl"
    directory = tmp_path / "run"
    turns = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat on the mat"},
    ]
    write(data, [{"messages": turns}] * 8)
    more = "data.format=examples model.vocab_size=301 train.sequence=32 mesh.data=1 mesh.tensor=1"
    again = lambda: run(data, directory, f"data.tokenizer={folder}", *more.split())
    result = again()
    whole = losses(directory)
    shutil.rmtree(directory / "checkpoints/10")
    tomorrow = lambda: time.time() + 24 * 3600
    later = types.SimpleNamespace(time=tomorrow, perf_counter=time.perf_counter)
    monkeypatch.setattr(timing, "time", later)
    assert again() == result
    assert losses(directory) == whole
