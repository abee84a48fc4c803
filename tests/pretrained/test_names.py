"""A model by its name, in any format, to text: by one command and by three lines of Python, as by way of `convert`."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

import ladder_jax as lj
from ladder_jax import checkpoint, decode, nn, pretrained
from ladder_jax.cli import main
from ladder_jax.errors import UserError
from ladder_jax.pretrained import hub as hubs
from tests import hub
from tests.pretrained import gguf_files, models

ROOT = pathlib.Path(__file__).parent.parent.parent
TEXT = "the"
NEW = dict(max_new_tokens=8)


def with_tokenizer(folder):
    gguf_files.small().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model of each family as a Hugging Face folder, and one as a GGUF file of bfloat16."""
    place = tmp_path_factory.mktemp("files")
    for name in models.FAMILIES:
        with_tokenizer(models.write(place / name, name))
    gguf_files.write(place / "small.gguf", "llama-2", kind=gguf_files.Kind.BF16)
    return place


def printed(capsys, *words):
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


def mistake(capsys, *words):
    assert main([*map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("name", [*models.FAMILIES, "small.gguf"])
def test_text_without_converting_first(name, files, tmp_path, capsys):
    """One command and three lines of Python give what the converted checkpoint gives, and below it the tokens."""
    words = ["--prompt", TEXT, "--max-new-tokens", "8"]
    text = printed(capsys, "generate", files / name, *words)
    assert text.startswith(TEXT) and len(text) > len(TEXT) + 1
    assert main(["convert", str(files / name), str(tmp_path / "new" / "converted")]) == 0
    capsys.readouterr()
    assert printed(capsys, "generate", tmp_path / "new" / "converted", *words) == text

    model = lj.from_pretrained(files / name)
    assert TEXT + model.generate(TEXT, **NEW) + "\n" == text
    again = lj.load(tmp_path / "new" / "converted")
    for ours, theirs in zip(jax.tree.leaves(model.params), jax.tree.leaves(again.params), strict=True):
        assert ours.dtype == theirs.dtype and (np.asarray(ours) == np.asarray(theirs)).all()


def test_ladder_layers_in_memory(files, tmp_path, capsys):
    """As `convert` makes them; and what it refuses."""
    words = ["--prompt", TEXT, "--max-new-tokens", "8"]
    for options in (["--ladder-layers", "1"], ["--ladder-layers", "all", "--residual", "ladder-2"]):
        text = printed(capsys, "generate", files / "llama-2", *words, *options)
        assert main(["convert", str(files / "llama-2"), str(tmp_path / options[-1]), *options]) == 0
        capsys.readouterr()
        assert printed(capsys, "generate", tmp_path / options[-1], *words) == text
    model = lj.from_pretrained(files / "llama-2", ladder_layers=[0, 1], residual="ladder-2", dtype="bfloat16")
    assert (model.config.residual, model.topology.num_layers) == ("ladder-2", 2)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {np.dtype("bfloat16")}
    generate = ["generate", files / "llama-2", "--prompt", TEXT]
    for options, message in (
        (["--residual", "ladder"], "--residual needs --ladder-layers"),
        (["--ladder-layers", "auto:1"], "is measured, so only a conversion can choose it"),
        (["--ladder-layers", "1", "--residual", "ladder-fresh"], "set --ranks N"),
        (["--ladder-layers", "1", "--residual", "parallel"], "unknown ladder kind"),
    ):
        assert message in mistake(capsys, *generate, *options)
    converted = tmp_path / "1"
    assert f"{str(converted)!r} is ladder" in mistake(
        capsys, "generate", converted, "--prompt", TEXT, "--ladder-layers", "1", "--residual", "ladder-2"
    )


def test_evaluate_and_the_models_of_other_commands(files, tmp_path, capsys):
    """Their shapes are read, without weights."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat " * 8)
    found = printed(capsys, "evaluate", files / "llama-2", "--text", tmp_path / "text.txt", "--window", "16", "--json")
    assert json.loads(found)["tokens"] > 50
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(models.config("qwen2")))
    words = ["--hardware", "h100-nvlink", "--tensor", "2", "--residual", "standard,ladder", "--json"]
    for name in (tmp_path / "shape", files / "small.gguf"):
        assert json.loads(printed(capsys, "predict", "--model", name, *words))["model"] == str(name)
    assert pretrained.model_config(tmp_path / "shape") == pretrained.open(files / "qwen2").model
    assert "allowed: 1, 2" in mistake(
        capsys, "predict", "--model", files / "qwen2", "--hardware", "v5e", "--tensor", "3"
    )


def test_names_of_nothing(files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setattr(hubs, "_repository", lambda _: pytest.fail("the Hub was asked"))
    for name, message in (
        ("smol.gguf", "there is no model at 'smol.gguf'; did you mean 'small.gguf'? (allowed: a run's folder, a Hug"),
        ("qwen2/nowhere", "there is no model at 'qwen2/nowhere'"),  # what is here is not the Hub's
        ("tiny", "'tiny' is a preset, a shape without weights"),
        ("hf://one", "write hf://org/name[@revision]"),
    ):
        assert message in mistake(capsys, "generate", name, "--prompt", "x")
    assert "did you mean 'qwen3'?" in mistake(capsys, "evaluate", "qwen4", "--text", "small.gguf")
    predict = ["predict", "--hardware", "v5e", "--model"]
    assert "unknown preset 'llama-3-7b'; did you mean 'llama-3-70b'?" in mistake(capsys, *predict, "llama-3-7b")
    with pytest.raises(UserError, match="there is no model at 'someone/small'"):
        lj.load("someone/small")


@pytest.mark.parametrize(
    "name, parts",
    [
        ("org/name", ("org/name", None, None)),
        ("hf://org/na-me.1@v1/x", ("org/na-me.1", None, "v1/x")),
        ("org/name/q/x.gguf@main", ("org/name", "q/x.gguf", "main")),
        ("org/name.gguf", None),
        ("org", None),
        ("../name", None),
        ("org/name/file.bin", None),
        ("/org/name", None),
    ],
)
def test_identifiers(name, parts):
    parsed = hubs.Identifier.parse(name)
    assert parsed == (parts and hubs.Identifier(*parts))
    assert parsed is None or hubs.Identifier.parse(str(parsed)) == parsed


SCRIPT = """
import json, sys
import ladder_jax as lj
from ladder_jax.errors import RunFailed, UserError

def text(name):
    try:
        return lj.from_pretrained(name).generate("the", max_new_tokens=8)
    except (UserError, RunFailed) as error:
        return str(error)

print(json.dumps([text(name) for name in sys.argv[1:]]))
"""


def in_python(*names, script=SCRIPT, **environment):
    command = [sys.executable, "-W", "error", "-c", script, *names]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_hub(files, tmp_path, run_cli, capsys):
    """Only what is read is downloaded, once; and without a connection, the cache is used, or named."""
    folder = tmp_path / "model"
    (files / "llama-3.2").rename(folder)
    try:
        (folder / "pytorch_model.bin").write_bytes(b"x")
        (folder / "onnx").mkdir()
        (folder / "onnx" / "model.safetensors").write_bytes(b"x")
        text = printed(capsys, "generate", folder, "--prompt", TEXT, "--max-new-tokens", "8")
        place = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        with hub.served(folder, name="someone/small", kind="models") as (url, asked):
            here = {**place, "HF_ENDPOINT": url}
            words = ["--prompt", TEXT, "--max-new-tokens", "8"]
            done = run_cli("generate", "someone/small", *words, check_status=0, **here)
            assert done.stdout == text
            got = {one.partition("/resolve/")[2].partition("/")[2] for one in asked if "/resolve/" in one}
            assert got == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
            names = [f"someone/small@{hub.COMMIT}", "someone/small@gone", "someone/else", "hf://someone/small/x.gguf"]
            exact, revision, unknown, no_file = in_python(*names, **here)
            assert TEXT + exact + "\n" == text
            assert revision == "'someone/small@gone': the Hub has no revision 'gone' of it"
            assert unknown.startswith("there is no model 'someone/else': no such path here, and no such repository at")
            assert no_file == "'someone/small/x.gguf' holds no x.gguf"
            again = len([one for one in asked if one.startswith("GET") and "/resolve/" in one])
            assert again == len(got)
        gone = {**place, "HF_ENDPOINT": url}
        for offline in (gone, {**gone, "HF_HUB_OFFLINE": "1"}):
            cached, absent = in_python("someone/small", "someone/else", **offline)
            assert TEXT + cached + "\n" == text
            assert absent.startswith(f"no connection to {url} (") and "\n" not in absent
            assert absent.endswith(f"and 'someone/else' is not in the cache at {tmp_path / 'home' / 'hub'}")
    finally:
        folder.rename(files / "llama-3.2")


def test_gguf_files_of_the_hub(tmp_path):
    """Of several one has to be named."""
    (tmp_path / "files").mkdir()
    for name in ("a", "b"):
        gguf_files.write(tmp_path / "files" / f"{name}.gguf", "llama-2")
    place = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with hub.served(tmp_path / "files", name="someone/small", kind="models") as (url, asked):
        several, one = in_python("someone/small", "someone/small/b.gguf", HF_ENDPOINT=url, **place)
    assert several.endswith("name one of its GGUF files, as in 'someone/small/a.gguf' (a.gguf, b.gguf)")
    assert one and "someone" not in one
    assert not any("a.gguf" in request for request in asked)


PUSH = """
import json, sys
import ladder_jax as lj
print(json.dumps(lj.from_pretrained(sys.argv[1]).push_to_hub("someone/copy")))
"""


def test_push_to_the_hub(files, tmp_path):
    (tmp_path / "copy").mkdir()
    place = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with hub.served(tmp_path / "copy", name="someone/copy", kind="models") as (url, _):
        said = in_python(str(files / "qwen3"), script=PUSH, HF_ENDPOINT=url, HF_TOKEN="hf_of_a_test", **place)
    assert said == f"{url}/someone/copy"
    ours, theirs = lj.from_pretrained(tmp_path / "copy"), lj.from_pretrained(files / "qwen3")
    assert ours.config == theirs.config and ours.tokenizer.name == theirs.tokenizer.name
    for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        assert (np.asarray(a) == np.asarray(b)).all()


@pytest.fixture(scope="module")
def model():
    return lj.Transformer(
        lj.preset("tiny", num_layers=2, d_model=32, d_ff=48), rngs=nnx.Rngs(3), mesh=lj.make_mesh(tensor=2)
    )


def test_saved_and_loaded(model, tmp_path, capsys):
    """One's own weights, on any mesh, and as an export."""
    model.save(tmp_path / "new" / "one")
    again = lj.load(str(tmp_path / "new" / "one"), mesh=lj.make_mesh(tensor=4))
    assert again.mesh.shape["tensor"] == 4 and again.config == model.config
    for ours, theirs in zip(jax.tree.leaves(model.params), jax.tree.leaves(again.params), strict=True):
        assert ours.dtype == theirs.dtype and (np.asarray(ours) == np.asarray(theirs)).all()
    assert not checkpoint.verify(tmp_path / "new" / "one" / "checkpoints" / "0")
    text = printed(
        capsys, "generate", tmp_path / "new" / "one", "--tensor", "2", "--prompt", TEXT, "--max-new-tokens", 8
    )
    assert text == TEXT + model.generate(TEXT, **NEW) + "\n"
    with pytest.raises(UserError, match="is there already"):
        model.save(tmp_path / "new" / "one")
    model.save(tmp_path / "export", format="huggingface")
    exported = json.loads((tmp_path / "export" / "config.json").read_text())
    assert exported["num_hidden_layers"] == 2 and (tmp_path / "export" / "modeling_ladder.py").is_file()
    with pytest.raises(UserError, match="unknown format 'hugging'; did you mean 'huggingface'"):
        model.save(tmp_path / "other", format="hugging")


def test_generate_follows_the_weights(model):
    """The copy for decoding is made once, and again when a parameter was replaced; Generator and Engine are equal."""
    before = model.generate(TEXT, **NEW)
    prepared = dict(model._prepared._generators)
    assert model.generate(TEXT, **NEW) == before == "".join(model.stream(TEXT, **NEW))
    assert prepared and all(model._prepared._generators[key] is one for key, one in prepared.items())
    form = lj.DecodeConfig(**NEW)
    tokens = decode.Generator(model).tokens([list(TEXT.encode())], config=form)[0].tolist()
    engine = decode.Engine(model, slots=1, capacity=64, decoder=model.tokenizer.to_bytes)
    assert engine.submit(decode.Request(list(TEXT.encode()), **NEW)).result().tokens == tuple(tokens)
    assert model.tokenizer.decode(tokens) == before
    kept = model.head.table[...]
    model.head.table[...] = kept[::-1]
    assert model.generate(TEXT, **NEW) != before
    model.head.table[...] = kept
    assert model.generate(TEXT, **NEW) == before


def test_what_a_model_refuses(model):
    with pytest.raises(UserError, match="unknown setting 'decode.max_tokens'; did you mean 'decode.max_new_tokens'"):
        model.generate("x", max_tokens=3)
    with pytest.raises(UserError, match="no chat template"):
        model.generate([{"role": "user", "content": "x"}])
    other = lj.Transformer(lj.preset("tiny", num_layers=1, vocab_size=300), rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="has no tokenizer"):
        other.generate("x")
    with pytest.raises(UserError, match="decoding needs a Transformer, or a ModelDef and its params"):
        decode.Generator(model.definition)
    assert isinstance(other, nn.Transformer) and "tiny" in lj.presets
