"""The readers of files: for each, a valid folder, how its files are damaged, and what a command
does with them.
"""

import dataclasses
import json
import pathlib
import zipfile
from collections.abc import Callable, Mapping

import numpy as np

from ladder_jax import config, pretrained
from ladder_jax.checkpoint import manifest, saved
from ladder_jax.config import DecodeConfig, ModelConfig, RunConfig
from ladder_jax.data import dataset, examples, json_lines, tokenizer as tokenizers
from ladder_jax.data.store import Store, manifest as manifests, sources
from ladder_jax.data.store.manifest import Manifest
from ladder_jax.decode.engine import jsonl
from ladder_jax.evaluate.tasks import read_choices, read_questions
from ladder_jax.predict import machine
from ladder_jax.train import folder as runs, metrics
from tests import tokenizers as tiny
from tests.fuzz import mutate
from tests.fuzz.mutate import Mutation
from tests.lines import write

FEW = RunConfig(
    model=ModelConfig(
        vocab_size=256, d_model=16, num_heads=2, num_kv_heads=2, num_layers=1, d_ff=16
    )
)
STEP = "checkpoints/7"


@dataclasses.dataclass(frozen=True)
class Reader:
    """make: writes the valid folder. damage: how each file is changed. read: raises UserError or
    nothing.
    """

    make: Callable[[pathlib.Path], object]
    damage: Mapping[str, Mutation]
    read: Callable[[pathlib.Path, str], object]


def _folder_of_weights(folder):
    from tests.pretrained import models

    models.write(
        folder, "llama-3.1", hidden_size=8, intermediate_size=8, vocab_size=16, num_hidden_layers=2
    )


def _gguf(folder):
    from gguf import GGMLQuantizationType

    from tests.pretrained import gguf_files

    gguf_files.write(folder / "model.gguf", "llama-3.1", kind=GGMLQuantizationType.Q8_0)


def _model(path):
    source = pretrained.open(path)
    for stored in source.arrays.values():
        assert stored.read().shape == stored.shape
    return source


def _gguf_model(folder, changed):
    source = _model(folder / changed)
    (folder / "own").mkdir(exist_ok=True)
    for name, content in source.files.items():
        (folder / "own" / name).write_bytes(content)
    _tokenizer(folder / "own", changed)


def _tokenizer_folder(folder):
    tiny.folder(folder)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": tiny.END}})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))


def _tokenizer(folder, changed):
    tokenizer = tokenizers.load(folder)
    tokens = tokenizer.encode("the cat é 東京 <tool>")
    tokenizer.encode("", special=False)
    (
        tokenizer.decode(tokens),
        tokenizer.to_bytes(range(tokenizer.vocab_size if tokenizer.vocab_size < 10**4 else 10)),
    )
    (
        tokenizer.offsets("the cat", special=True),
        tokenizers.check_vocabulary(tokenizer, vocab_size=2**31),
    )
    if tokenizer.has_chat:
        tokenizer.chat(
            [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
        )


def _checkpoint(folder):
    """As a run wrote it once."""
    with zipfile.ZipFile(pathlib.Path(__file__).parents[1] / "checkpoint_1.zip") as recorded:
        files = [name for name in recorded.namelist() if name.startswith(STEP)]
        recorded.extractall(folder, files)


def _checkpoint_read(folder, changed):
    step = folder / STEP
    if changed.endswith("metadata") and (folder / changed).stat().st_size % 2:
        manifest.write(step)  # as whoever can write there would
    saved.verify(step)
    opened = saved.open_checkpoint(folder)
    opened.check(), opened.identity, opened.config, saved.steps(folder)
    manifest.problems(step, contents=("params/",))


def _store(folder):
    texts = [f"number {index} é\n".encode() * (index % 5 + 1) for index in range(20)]
    (folder / "00000.tokens").write_bytes(b"".join(texts))
    offsets = np.cumsum([0, *map(len, texts)]).astype("<u8")
    offsets.tofile(folder / "00000.offsets")
    shard = manifests.Shard("00000", int(offsets[-1]), len(texts), "0" * 64, "0" * 20)
    manifests.write(Manifest("bytes", 256, "text", (shard,)), folder / "manifest.json")


def _store_read(folder, changed):
    store = Store(folder)
    assert store.manifest.fingerprint
    for start, count in zip(store.starts.tolist(), np.diff(store.starts).tolist()):
        store.read(start, count)
    store.tokenizer(), store.verify()


LINES = {
    "texts.jsonl": [{"text": "one"}, {"text": "two é"}],
    "chats.jsonl": [
        {"prompt": "a", "completion": "b"},
        {"messages": [{"role": "user", "content": "c"}]},
    ],
    "choices.jsonl": [{"question": "2 + 2", "choices": ["3", "4"], "answer": 1}],
    "questions.jsonl": [{"context": "2 + 2", "answer": "#### 4"}],
    "prompts.jsonl": [
        {"prompt": "a", "id": 1, "temperature": 0.5, "stop": ["b"], "stop_ids": [3]},
        {"prompt": "c"},
    ],
    "answers.jsonl": [{"index": 0, "id": 1, "text": "b", "request": "0123"}],
    "metrics.jsonl": [{"step": 1, "loss": 2.5, "time": 1.5}, {"step": 2, "loss": None}],
    "zipped.jsonl.gz": [{"text": "one"}, {"text": "two"}],
}


def _lines(folder):
    for name, rows in LINES.items():
        write(folder / name, rows)


def _lines_read(folder, changed):
    file = str(folder / changed)
    prompts = dict(
        defaults=DecodeConfig(),
        stop=(),
        tokenizer=tokenizers.load("bytes"),
        vocab_size=256,
        model="m",
    )
    match changed.partition(".")[0]:
        case "texts" | "zipped":
            for part in sources.plan([file], most=30):
                list(sources.read(part, field="text"))
            list(json_lines.read(file))
        case "chats":
            examples.load(file, tokenizer=tokenizers.load("bytes"), length=8)
        case "choices":
            read_choices(file)
        case "questions":
            read_questions(file)
        case "prompts":
            jsonl.read(file, **prompts)
        case "answers":
            jobs = jsonl.read(str(folder / "prompts.jsonl"), **prompts)
            jsonl.answered(file, {jobs[0].index: "0123", jobs[1].index: jobs[1].digest})
        case "metrics":
            metrics.Metrics(metrics.SmallFiles(folder, say=print), step=1).close()


YAMLS = {
    "run.yaml": "model:\n  preset: tiny\n  residual: ladder\nmesh:\n  tensor: 2\n"
    "train:\n  steps: 10\n  learning_rate: 3e-4\ndata:\n  path: stdlib\nrun:\n  name: x\n  dir: y\n",
    "override.txt": "train.learning_rate: 3e-4\n",
    "mixture.yaml": "mixture:\n  web: 7\n  code: 3\n",
    "hardware.yaml": "based_on: v5e\nbandwidth: {value: 4.8e12, source: TEXT}\nlink:\n  latency: 1e-6\n",
}


def _yamls(folder):
    for name, text in YAMLS.items():
        (folder / name).write_text(text)


def _yamls_read(folder, changed):
    if changed == "run.yaml":
        config.to_dict(config.load(str(folder / changed)))
    elif changed == "override.txt":
        text = (folder / changed).read_bytes().decode(errors="surrogateescape").replace("\x00", "")
        config.load("tiny", overrides=[text.replace(": ", "=", 1)])
    elif changed == "mixture.yaml":
        dataset.read_mixture(folder / changed)
    else:
        machine.load(str(folder / changed))


def _configs(folder):
    _folder_of_weights(folder)
    (folder / "run").mkdir()
    (folder / "run/config.json").write_text(json.dumps(config.to_dict(FEW)))


def _configs_read(folder, changed):
    if changed.startswith("run/"):
        return runs.check(FEW, folder / "run")
    _model(folder)


READERS = {
    "safetensors": Reader(
        _folder_of_weights, {"model.safetensors": mutate.safetensors}, lambda f, _: _model(f)
    ),
    "gguf": Reader(_gguf, {"model.gguf": mutate.gguf}, _gguf_model),
    "config": Reader(
        _configs,
        dict.fromkeys(
            ["config.json", "generation_config.json", "run/config.json"], mutate.json_text
        ),
        _configs_read,
    ),
    "tokenizer": Reader(
        _tokenizer_folder,
        dict.fromkeys(
            [
                "tokenizer.json",
                "tokenizer_config.json",
                "special_tokens_map.json",
                "generation_config.json",
            ],
            mutate.json_text,
        )
        | {"chat_template.jinja": mutate.octets},
        _tokenizer,
    ),
    "checkpoint": Reader(
        _checkpoint,
        dict.fromkeys(
            [f"{STEP}/{name}" for name in ("manifest.json", "meta/metadata", "data/metadata")],
            mutate.json_text,
        ),
        _checkpoint_read,
    ),
    "store": Reader(
        _store,
        {
            "manifest.json": mutate.json_text,
            "00000.tokens": mutate.octets,
            "00000.offsets": mutate.octets,
        },
        _store_read,
    ),
    "lines": Reader(
        _lines,
        dict.fromkeys(LINES, mutate.json_lines) | {"zipped.jsonl.gz": mutate.zipped},
        _lines_read,
    ),
    "yaml": Reader(_yamls, dict.fromkeys(YAMLS, mutate.yaml_text), _yamls_read),
}
