"""What of a tokenizer's folder travels into an export that needs trust_remote_code: no program, no
foreign file.
"""

import dataclasses
import json
import os

import pytest

import ladder_jax as lj
from ladder_jax import checkpoint, pretrained
from tests.pretrained import gguf_files, models
from tests.pretrained.test_convert import convert
from tests.refusals import refused

FOREIGN = {
    "tokenizer_class": "EvilTokenizer",
    "auto_map": {"AutoTokenizer": [None, "own.EvilTokenizer"]},
    "chat_template": "{{ messages }}",
}
TOKENIZER = '{"model": {"vocab": {"a": 128}}}'


def plant(folder):
    """A tokenizer that wants a program to be run, and the program."""
    (folder / "tokenizer.json").write_text(TOKENIZER)
    (folder / "tokenizer_config.json").write_text(json.dumps(FOREIGN))
    for name in ("own.py", "modeling_ladder.py", "tokenization_own.py", "pytorch_model.bin"):
        (folder / name).write_text("raise SystemExit('executed')")


def check(out):
    assert json.loads((out / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": FOREIGN["chat_template"],
    }
    mapped = json.loads((out / "config.json").read_text())["auto_map"]
    assert mapped == {
        name: f"modeling_ladder.Ladder{name[4:].replace('ModelFor', 'For')}" for name in mapped
    }
    ours = {"config.json", "generation_config.json", "model.safetensors", "modeling_ladder.py"}
    assert set(os.listdir(out)) - {"chat_template.jinja"} == {
        *ours,
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert "executed" not in (out / "modeling_ladder.py").read_text()


def ladder(source):
    return dataclasses.replace(source, model=dataclasses.replace(source.model, residual="ladder"))


def test_programs_stay_behind(tmp_path):
    folder = models.write(tmp_path / "in", "llama-2")
    plant(folder)
    pretrained.write_huggingface(ladder(pretrained.open(folder)), tmp_path / "out")
    check(tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast"]
)
def test_known_classes_stay(name, tmp_path):
    """As do the bytes of a file in which nothing is foreign."""
    folder = models.write(tmp_path / "in", "llama-2")
    content = f'{{"tokenizer_class":   "{name}"}}'.encode()
    (folder / "tokenizer_config.json").write_bytes(content)
    assert pretrained.open(folder).files == {"tokenizer_config.json": content}
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": ["x"], "auto_map": 3}')
    assert json.loads(pretrained.open(folder).files["tokenizer_config.json"]) == {}
    for wrong in ("[]", "{", "[" * 100_000):
        (folder / "tokenizer_config.json").write_text(wrong)
        with refused("tokenizer_config.json' (is not JSON|must hold a JSON object)"):
            pretrained.open(folder)


@pytest.fixture
def run(tmp_path):
    """A checkpoint of a ladder, with a tokenizer's folder."""
    convert(gguf_files.write(tmp_path / "a.gguf", "llama-2"), tmp_path / "run", ladder_layers="all")
    (tmp_path / "run/tokenizer").mkdir(exist_ok=True)
    return tmp_path / "run"


def test_of_a_checkpoint_too(run, tmp_path):
    """Of whatever else lies beside a tokenizer's files, nothing is copied."""
    tokenizer = run / "tokenizer"
    plant(tokenizer)
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": 2}')
    (tokenizer / "sub").mkdir()
    (tokenizer / "notes.txt").symlink_to("/etc/passwd")
    pretrained.write_huggingface(pretrained.open(run), tmp_path / "out")
    check(tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"eos_token_id": 2}


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json"])
@pytest.mark.parametrize("target", ["secret", "nowhere"])
def test_links_are_not_followed(run, tmp_path, name, target):
    (tmp_path / "secret").write_text("{}")
    (run / "tokenizer" / name).unlink(missing_ok=True)
    (run / "tokenizer" / name).symlink_to(tmp_path / target)
    with refused(f"{name}' leads out of its folder"):
        pretrained.open(run)
    (run / "tokenizer/merges.txt").symlink_to(tmp_path / target)
    model = lj.load(run)
    assert "merges.txt" not in model.tokenizer.files
    if target == "secret":
        with refused(f"{name}' leads out of its folder"):
            model.save(tmp_path / "out", format="huggingface")
    assert checkpoint.open_checkpoint(run).config.model.residual == "ladder"


def test_links_of_a_hub_cache_and_others(tmp_path):
    (tmp_path / "cache/blobs").mkdir(parents=True)
    folder = models.write(tmp_path / "cache/snapshots/0a1b", "llama-2")
    (tmp_path / "cache/blobs/c0ffee").write_text(TOKENIZER)
    (folder / "tokenizer.json").symlink_to("../../blobs/c0ffee")
    assert pretrained.open(folder).files == {"tokenizer.json": TOKENIZER.encode()}
    (tmp_path / "blobs").mkdir()
    for target in (tmp_path / "secret", tmp_path / "blobs/c0ffee"):
        target.write_text("mine")
        (folder / "vocab.json").unlink(missing_ok=True)
        (folder / "vocab.json").symlink_to(target)
        with refused("vocab.json' leads out of its folder"):
            pretrained.open(folder)
