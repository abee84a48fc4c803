"""A model by its name, in any format, to text: by one command and by three lines of Python, as by
way of `convert`.
"""

import contextlib
import copy
import functools
import gc
import json
import shutil
import sys
import types
import weakref
from unittest import mock

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ladder_jax as lj
from ladder_jax import checkpoint, nn, pretrained
from ladder_jax.bench import request as benches
from ladder_jax.config import CollectiveMatmul, DecodeConfig, Dtype, Loop, Phase, Quantize
from ladder_jax.data.tokenizer import Bytes
from ladder_jax.decode import memory
from ladder_jax.overlap import request as overlaps
from ladder_jax.plan import request as plans
from ladder_jax.pretrained import hub as hubs, transformer
from ladder_jax.retrain import sources
from tests import cases, hub, refusals, starts
from tests.covering import full
from tests.pretrained import conftest, gguf_files, models

TEXT = "the"
NEW = dict(max_new_tokens=16, temperature=1.5, seed=1)
WORDS = ["--prompt", TEXT, "--max-new-tokens", "16", "--temperature", "1.5", "--seed", "1"]


def with_tokenizer(folder):
    gguf_files.small().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model of each family as a Hugging Face folder, and one as a GGUF file of bfloat16."""
    place = tmp_path_factory.mktemp("files")
    for name in models.FAMILIES:
        with_tokenizer(models.write(place / name, name, vocab_size=100))
    gguf_files.write(place / "small.gguf", "llama-2", kind=gguf_files.Kind.BF16, vocab_size=100)
    return place


def by_way_of_convert(prints, source, converted, *how):
    """The text of a model, and of the checkpoint that `convert` makes of it."""
    text = prints("generate", source, *WORDS, *how)
    prints("convert", source, converted, *how)
    assert prints("generate", converted, *WORDS) == text
    return text


def same(ours, theirs):
    """Parameters, to the last bit."""
    equal = lambda a, b: a.dtype == b.dtype and np.array_equal(a, b)
    assert jax.tree.all(jax.tree.map(equal, ours, theirs))


# In `make test` every family's logits are compared in test_in.py, and below is text of a folder.
@pytest.mark.parametrize("name", ["small.gguf", *map(full, models.FAMILIES)])
def test_text_without_converting_first(name, files, tmp_path, prints):
    """One command and three lines of Python give what the converted checkpoint gives, and below it
    the tokens.
    """
    converted = tmp_path / "new/converted"
    text = by_way_of_convert(prints, files / name, converted)
    assert text.startswith(TEXT)
    assert len(text) > len(TEXT) + 1
    model = lj.from_pretrained(files / name)
    assert TEXT + model.generate(TEXT, **NEW) + "\n" == text
    same(model.params, lj.load(converted).params)


def test_ladder_layers_in_memory(files, tmp_path, prints, mistake):
    """As `convert` makes them."""
    converted = tmp_path / "converted"
    by_way_of_convert(prints, files / "llama-2", converted, "--ladder-layers", "1")
    said = mistake("generate", converted, *WORDS, "--ladder-layers", "1", "--residual", "ladder-2")
    assert f"{str(converted)!r} is ladder" in said
    said = mistake("generate", files / "llama-2", *WORDS, "--ladder-layers", "auto:1")
    assert "auto:N for a conversion alone" in said
    model = lj.from_pretrained(
        files / "llama-2", ladder_layers=[0, 1], residual="ladder-2", dtype="bfloat16"
    )
    assert (model.config.residual, model.topology.num_layers) == ("ladder-2", 2)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {np.dtype("bfloat16")}
    run = tmp_path / "run"  # how it trained does not count
    ring = dict(sequence_parallel=True, collective_matmul=CollectiveMatmul.RING)
    starts.save(run / "checkpoints", cases.define("standard", tensor=2), train=ring)
    for residual, ranks, tensor in (("parallel-ladder", None, 2), ("ladder-fresh", 4, 1)):
        opened = pretrained.open_model(run, ladder_layers="all", residual=residual, ranks=ranks)
        assert (opened.config.mesh.tensor, opened.config.train.sequence) == (tensor, 64)


@pytest.mark.parametrize(
    "name, dtype", [("llama-2", "bfloat16"), ("small.gguf", jnp.float32)], ids=str
)
def test_a_dtype_is_of_parameters_and_compute(name, dtype, files, tmp_path):
    """As in transformers; of a model that computes in the other one, and of its checkpoint."""
    stored = lj.from_pretrained(files / name)
    stored.save(tmp_path / "saved")
    for model in (
        lj.from_pretrained(files / name, dtype=dtype),
        lj.load(tmp_path / "saved", dtype=dtype),
    ):
        assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {np.dtype(dtype)}
        assert (
            model.config.dtype
            is model.config.residual_dtype
            is Dtype(dtype)
            is not stored.config.dtype
        )
        assert model.generate(TEXT, **NEW)
    assert lj.load(tmp_path / "saved").config == stored.config
    with refusals.refused(
        r"unknown dtype 'float16'; did you mean .* \(allowed: bfloat16, float32\)"
    ):
        lj.from_pretrained(files / name, dtype="float16")


def test_other_commands_read_the_shape_alone(files, tmp_path, prints, mistake):
    """Of models without weights, and of a file of one with them: two layers each."""
    shape = tmp_path / "shape"
    mine = tmp_path / "mine.yaml"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(models.config("qwen2", vocab_size=100)))
    mine.write_text("model: {num_layers: 2, vocab_size: 300}\n")
    for name in (shape, mine, files / "small.gguf"):
        words = "--hardware h100-nvlink --tensor 2 --residual ladder --json".split()
        assert json.loads(prints("predict", "--model", name, *words))["model"] == str(name)
        where = dict(model=str(name), target="v5p:2x2x2")
        request = overlaps.make(**where, residual="ladder-fresh", tensor=2, phase=Phase.DECODE)
        assert (request.config.num_layers, request.config.ranks) == (2, 2)
        assert benches.make(model=str(name), residual="ladder").config("ladder").num_layers == 2
        assert plans.make(**where, tokens=64, sequence=32).config.num_layers == 2
    assert pretrained.model_config(shape) == pretrained.open(files / "qwen2").model
    three = ["predict", "--model", files / "qwen2", "--hardware", "v5e", "--tensor", "3"]
    assert "--tensor 3 does not split this model over v5e" in mistake(*three)


def test_training_starts_from_any_model(files, tmp_path, prints):
    """With its shape, weights and tokenizer. (Others in their place: in test_retrain.py.)"""
    folder = files / "llama-2"
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat " * 200)
    (tmp_path / "recipe.yaml").write_text("train: {steps: 1, evaluation_batches: 1}\n")
    words = [f"train.start={folder}", "model.residual=ladder", f"data.path={text}", "lora.rank=2"]
    words += [f"run.dir={tmp_path / 'run'}", "run.tensorboard=false"]
    words += ["train.batch=2", "train.sequence=16", "train.warmup_steps=0"]
    prints("train", tmp_path / "recipe.yaml", *words)
    saved = checkpoint.open_checkpoint(tmp_path / "run")
    source = pretrained.open(folder)
    assert (saved.config.model.residual, saved.config.model.d_model) == ("ladder", 32)
    assert saved.tokenizer().name == source.tokenizer.name
    start = sources.of_run(saved.config, recorded=saved.data["sources"]).start
    layers = start.params(start.define(), dtype=np.float32)["layers"]
    assert (np.asarray(layers["mlp"]["up"])[1] == source.arrays["layers/mlp/up", 1].read()).all()


@pytest.mark.parametrize(
    "words, message",
    {
        "generate smol.gguf --prompt x": "did you mean 'small.gguf'? (allowed: a run's folder, a Hug",
        # what is here is not the Hub's
        "generate qwen2/nowhere --prompt x": "there is no model at 'qwen2/nowhere'",
        "generate tiny --prompt x": "'tiny' is a preset, a shape without weights",
        "generate hf://one --prompt x": "write hf://org/name[@revision]",
        "evaluate mistrel --text qwen2/config.json": "did you mean 'mistral'?",
    }.items(),
)
def test_names_of_nothing(words, message, files, mistake, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setattr(hubs, "_snapshot", lambda *_, **__: pytest.fail("the Hub was asked"))
    assert message in mistake(*words.split())


def test_what_is_loaded_is_here():
    with refusals.refused("there is no model at 'someone/small'"):
        lj.load("someone/small")


@pytest.mark.parametrize(
    "name, parts",
    {
        "org/name": ("org/name", None, None),
        "hf://org/na-me.1@v1/x": ("org/na-me.1", None, "v1/x"),
        "org/name/q/x.gguf@main": ("org/name", "q/x.gguf", "main"),
        "org/name.gguf": None,
        "org": None,
        "../name": None,
        "org/name/file.bin": None,
        "/org/name": None,
    }.items(),
)
def test_identifiers(name, parts):
    parsed = hubs.Identifier.parse(name)
    assert parsed == (parts and hubs.Identifier(*parts))
    assert parsed is None or hubs.Identifier.parse(str(parsed)) == parsed


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Serves a folder as `someone/small` of the Hub, to this process; gives its address and what
    was asked.
    """
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    @contextlib.contextmanager
    def serve(folder):
        with hub.served(folder, name="someone/small", kind="models") as (url, asked):
            monkeypatch.setattr(constants, "ENDPOINT", url)
            template = url + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
            yield url, asked

    hubs.download.cache_clear()
    yield serve
    hubs.download.cache_clear()


def refused(name):
    return conftest.refused(name, by=lj.from_pretrained)


def downloaded(asked):
    return [one.split("/", maxsplit=5)[5] for one in asked if "/resolve/" in one and "GET" in one]


def test_a_model_of_the_hub(files, served, tmp_path, prints, monkeypatch):
    """Only what is read is downloaded, once; and without a connection, the cache is used, or
    named.
    """
    from huggingface_hub import constants

    folder = shutil.copytree(files / "llama-2", tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    (folder / "onnx").mkdir()
    (folder / "onnx/model.safetensors").write_bytes(b"x")
    text = prints("generate", files / "llama-2", *WORDS)
    shape = "predict --model someone/small --hardware v5e --tensor 1 --residual ladder".split()
    with served(folder) as (url, asked):
        prints(*shape)
        assert downloaded(asked) == ["config.json"]
        assert TEXT + lj.from_pretrained("someone/small").generate(TEXT, **NEW) + "\n" == text
        read = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
        assert sorted(downloaded(asked)) == read
        opened = pretrained.open_model(f"hf://someone/small@{hub.COMMIT}")
        assert opened.name == f"someone/small@{hub.COMMIT}"
        assert opened.config.run.name == "someone/small"
        assert sorted(downloaded(asked)) == read
        for name, why in (
            ("someone/small@gone", "Revision Not Found"),
            ("someone/else", "Repository"),
        ):
            said = refused(name)
            assert said.startswith(f"there is no model {name!r} here, and {url} does not give it: ")
            assert why in said
        assert "holds no x.gguf" in refused("hf://someone/small/x.gguf")
    monkeypatch.setattr(constants, "ENDPOINT", url := "http://127.0.0.1:9")  # where nobody listens
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        hubs.download.cache_clear()
        assert pretrained.open_model("someone/small").name == f"someone/small@{hub.COMMIT}"
        assert f"{url} does not give it: " in refused("someone/else")
    lacking = next((tmp_path / "cache").rglob("model.safetensors"))
    lacking.unlink()
    hubs.download.cache_clear()
    assert "does not give it: The cached snapshot" in refused("someone/small")
    # as huggingface_hub 1.20, which does not look whether all files are there
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: lacking.parent)
    assert f"{url} does not give it: " in refused("someone/small")


def test_gguf_files_of_the_hub(files, served, tmp_path):
    """Of several one has to be named."""
    for name in ("a", "b"):
        shutil.copy(files / "small.gguf", tmp_path / f"{name}.gguf")
    with served(tmp_path) as (_, asked):
        how = "name one of its GGUF files: someone/small/a.gguf, someone/small/b.gguf"
        assert refused("someone/small").endswith(how)
        assert pretrained.open("someone/small/b.gguf").model.num_layers == 2
        assert downloaded(asked) == ["b.gguf"]


def test_push_to_the_hub(files, tmp_path, monkeypatch):
    def uploaded(*, repo_id, folder_path, commit_message):
        shutil.copytree(folder_path, tmp_path / "copy")
        return types.SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    api = mock.create_autospec(huggingface_hub.HfApi)
    api.return_value.upload_folder.side_effect = uploaded
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    model = lj.from_pretrained(files / "qwen3")
    assert model.push_to_hub("someone/small", private=True) == "https://hub/someone/small"
    api.return_value.create_repo.assert_called_once_with(
        "someone/small", private=True, exist_ok=True
    )
    ours = lj.from_pretrained(tmp_path / "copy")
    assert ours.config == model.config
    assert ours.tokenizer.name == model.tokenizer.name
    same(ours.params, model.params)
    monkeypatch.setattr(lj.Transformer, "save", None)  # before anything is written
    with refusals.refused("is no repository's name"):
        model.push_to_hub("someone")
    with refusals.refused("is no export"):
        pretrained.push_to_hub(str(tmp_path), "someone/small")


@pytest.fixture(scope="module")
def model():
    mesh = lj.make_mesh(tensor=2)
    # bytes, and one more
    shape = lj.preset("tiny", num_layers=1, d_model=32, d_ff=48, vocab_size=257)
    params = cases.parameters(nn.define(shape, mesh=mesh))  # NumPy's, which are written in place
    return lj.Transformer(shape, mesh=mesh, params=params, tokenizer=Bytes())


def test_saved_and_loaded(model, tmp_path, prints):
    """One's own weights, on any mesh, and as an export."""
    saved = tmp_path / "new/one"
    model.decode = DecodeConfig(top_k=3)
    model.save(saved)
    model.decode = DecodeConfig()
    again = lj.load(str(saved), mesh=lj.make_mesh(tensor=4))
    assert again.decode == pretrained.open(saved).decode == DecodeConfig(top_k=3)
    assert pretrained.open(saved).tokenizer == Bytes()
    assert again.mesh.shape["tensor"] == 4
    assert again.config == model.config
    # unpadded
    same(
        model.params,
        jax.tree.map(lambda ours, theirs: theirs[: len(ours)], model.params, again.params),
    )
    assert not checkpoint.verify(saved / "checkpoints/0")
    text = prints("generate", saved, "--tensor", "2", *WORDS)
    assert text == TEXT + model.generate(TEXT, top_k=3, **NEW) + "\n"
    with refusals.refused("is there already"):
        model.save(saved)
    model.save(tmp_path / "export", format="huggingface")
    assert pretrained.open(tmp_path / "export").model.num_layers == 1
    with refusals.refused("unknown format 'hugging'; did you mean 'huggingface'"):
        model.save(tmp_path / "other", format="hugging")


def test_a_model_holds_its_tokenizer(files, tmp_path):
    """What is saved is what was loaded, wherever those files are now."""
    folder = tmp_path / "run"
    lj.from_pretrained(files / "qwen3").save(folder)
    model = lj.load(folder)
    held = model.tokenizer.files
    shutil.rmtree(folder)
    copied = copy.deepcopy(model)
    copied.save(tmp_path / "again")
    copied.save(tmp_path / "export", format="huggingface")
    for name in ("again", "export"):
        found = lj.load(tmp_path / name).tokenizer
        assert found == copied.tokenizer
        assert found.files.keys() == held.keys()


def test_generate_follows_the_weights(model):
    """The copy for decoding is made once, and again when a parameter was replaced."""
    generate = lambda: model.generate(TEXT, **NEW)
    before = generate()
    prepared = transformer._prepared[model]
    assert generate() == before == "".join(model.stream(TEXT, **NEW))
    # a stop string alone is one, not its letters
    assert model.generate(TEXT, stop=before[::-1], **NEW) == before
    assert prepared is transformer._prepared[model]
    kept = model.head.table[...]
    model.head.table[...] = 40 * kept[::-1]
    assert generate() != before
    model.head.table[...] = kept
    assert generate() == before


def test_two_threads_in_different_forms(model, monkeypatch):
    """One prepares its copy of the weights while another's is about to be returned."""
    prepared = functools.partial(transformer._generator, model, capacity=32, quantize=Quantize.NONE)
    before = memory.explained

    @contextlib.contextmanager
    def explained(what):
        yield
        monkeypatch.setattr(memory, "explained", before)
        prepared(loop=Loop.UNROLLED)

    monkeypatch.setattr(memory, "explained", explained)
    assert prepared(loop=Loop.SCAN).loop is Loop.SCAN


def test_two_models_of_one_file_are_one_program(files):
    """They differ in their parameters alone, as Flax needs it for maps over two models."""
    one, two = (lj.from_pretrained(files / "llama-2") for _ in range(2))
    assert one.tokenizer is not two.tokenizer
    graph, state = nnx.split(one)
    other_graph, other_state = nnx.split(two)
    assert graph == other_graph
    mean = nnx.merge(graph, jax.tree.map(lambda a, b: (a + b) / 2, state, other_state))
    assert mean.generate(TEXT, **NEW) == one.generate(TEXT, **NEW)
    # jax keeps the graphs of what it has compiled, and they no weights
    copies = weakref.ref(transformer._prepared[one].generator)
    del one
    gc.collect()
    assert copies() is None


def test_what_a_model_refuses(model):
    with refusals.refused(
        "unknown setting 'decode.max_tokens'; did you mean 'decode.max_new_tokens'"
    ):
        model.generate("x", max_tokens=3)
    with refusals.refused("has no tokenizer"):
        lj.Transformer(model.config, mesh=model.mesh, params=model.params).generate("x")


def test_without_the_hubs_library(mistake, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = mistake("generate", "someone/small", "--prompt", "x")
    assert "need huggingface_hub: pip install 'ladder-jax[hf]'" in said
