"""GGUF files that say what no model would: refused in a line, in little time and memory."""

import struct

from tests.pretrained import gguf_files
from tests.pretrained.test_gguf import refused


def string(text):
    return struct.pack("<Q", len(text)) + text


def head_of(*settings, version=3, tensors=0):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(settings)) + b"".join(settings)


def many(kind, count=2**40):
    """A setting that is a list of so many items of a kind."""
    return string(b"tokenizer.ggml.scores") + struct.pack("<IIQ", 9, kind, count)


BOMBS = {
    "numbers": head_of(many(6)),
    "strings": head_of(many(8)),
    "lists": head_of(many(9)),
    "lists in lists": head_of(many(9, 1) + struct.pack("<IQ", 9, 1) * 100_000),
    "empty lists": head_of(*[many(9, 2**20) + struct.pack("<IQ", 9, 0) * 2**20] * 2),
    "settings": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
    "tensors": head_of(tensors=2**60),
    "a name": head_of(struct.pack("<Q", 2**63) + b"a"),
    "a text": head_of(string(b"a") + struct.pack("<IQ", 8, 2**63)),
    "a type": head_of(string(b"a") + struct.pack("<I", 77)),
    "version 2": head_of(many(6), version=2),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 1),
    "a version": head_of(many(6), version=1),
    "a fraction": head_of(string(b"general.alignment") + struct.pack("<If", 6, 32.0)),
    "before it": head_of(string(b"general.alignment") + struct.pack("<Ii", 5, -32)),
}


def test_counts_that_no_file_could_hold(run_python, tmp_path):
    """In little time and memory, whatever it says that it holds."""
    for name, content in BOMBS.items():
        (tmp_path / name).write_bytes(content)
    code = (
        "import os, resource, sys; from ladder_jax import pretrained; from ladder_jax.errors import UserError\n"
        "import gguf, jax\n"
        "os.chdir(sys.argv[1])\n"
        "held = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (held + 2**29,) * 2)\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (int(sum(resource.getrusage(0)[:2])) + 20,) * 2)\n"
        "for name in sorted(os.listdir()):\n"
        "    try: pretrained.open(name)\n"
        "    except UserError as error: print(error, flush=True)"
    )
    done = run_python("-c", code, tmp_path, timeout=100, check_status=0)
    said = done.stdout.splitlines()
    assert len(said) == len(BOMBS), done.stderr[-500:]
    for name, line in zip(sorted(BOMBS), said):
        assert line.startswith(f"'{name}' is ") and "MemoryError" not in line, line
        assert "damaged or incomplete" in line, line


def test_settings_of_another_type(tmp_path):
    """Named, whatever they are: ids as text, a template as a number."""
    wrong = {
        "tokenizer.ggml.bos_token_id": "1",
        "tokenizer.ggml.eot_token_id": "two",
        "tokenizer.ggml.padding_token_id": 1.5,
        "tokenizer.ggml.unknown_token_id": True,
        "tokenizer.ggml.add_bos_token": "yes",
        "tokenizer.ggml.merges": "a",
        "tokenizer.chat_template": 5,
        "context_length": "long",
    }
    for name, value in wrong.items():
        file = gguf_files.write(tmp_path / "a.gguf", "llama-2", settings={name: value})
        assert f"{name} must be" in refused(file)
