"""Memory that does not suffice for inference: refused before anything is read, or one line that
says what to lower.
"""

import dataclasses

import jax
import pytest

import ladder_jax as lj
from ladder_jax import checkpoint, cli, nn
from ladder_jax.checkpoint import Pieces, arrays
from ladder_jax.config import Loop
from ladder_jax.decode import Engine, memory, steps, weights
from ladder_jax.errors import UserError
from ladder_jax.pretrained import open_model
from tests import cases, starts
from tests.refusals import refused


def test_what_starting_takes_is_checked_before_anything_is_read(tmp_path, monkeypatch, mistake):
    """A table that fits in bfloat16, but not in float32 beside it."""
    definition = cases.define(
        "ladder", num_layers=1, vocab_size=4096, tie_embeddings=True, **starts.BFLOAT16
    )
    starts.save(tmp_path / "checkpoints", definition)
    kept, most = weights.needed_bytes(definition, loop=Loop.UNROLLED)
    # the table in both
    assert kept + memory.cache_bytes(definition, rows=1, capacity=64) < most == 4096 * 32 * 6

    monkeypatch.setattr(checkpoint.Checkpoint, "compare", failing(UserError("was read")))
    too_large = r"reading the weights needs .* GiB a device \(weights .*, one of them as it is"
    for free, message in ((most - 1, too_large), (most, "was read")):
        monkeypatch.setattr(memory, "free_memory", lambda *_, free=free, **__: free)
        with refused(message):
            open_model(tmp_path).engine(tensor=1, slots=1, capacity=16)
    monkeypatch.setattr(memory, "free_memory", lambda *_, **__: kept - 1)
    for verb, *words in (("generate", "--prompt", "a"), ("evaluate", "--text", __file__)):
        assert "reading the weights needs" in mistake(verb, tmp_path, *words, "--tensor", "1")


def failing(error):
    """A function that raises it, whatever it is given."""

    def fail(*_, **__):
        raise error

    return fail


failed = lambda text: failing(jax.errors.JaxRuntimeError(text))
exhausted = failed("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nand more")
exhausted_cpu = failed("INTERNAL: Error dispatching computation: Out of memory allocating 9 bytes.")
no_memory = failing(MemoryError("no more of it"))


@pytest.mark.parametrize(
    "what, where, error",
    [
        (weights, "_converter", exhausted),
        (arrays, "begin_read", no_memory),
        (steps, "prefill_chunks", no_memory),
        (steps, "decode_many", lambda *_, **__: exhausted_cpu),
    ],
)
def test_memory_that_does_not_suffice_is_one_line(
    wide, tmp_path, what, where, error, monkeypatch, capsys
):
    """While loading, compiling or running; the same for each verb that decodes."""
    monkeypatch.setattr(what, where, error)
    questions = tmp_path / "questions.jsonl"
    prompts = tmp_path / "prompts.jsonl"
    questions.write_text('{"question": "2 + 2 =", "answer": "#### 4"}\n')
    prompts.write_text('{"prompt": "a"}\n')
    said = "Out of memory allocating 9 bytes" if error is not no_memory else "no more of it"
    for verb in (
        ["generate", "--prompt", "a", "--max-new-tokens", "3"],
        ["generate", "--prompts", prompts, "--out", tmp_path / "out", "--max-new-tokens", "3"],
        ["serve", "--port", "0", "--capacity", "32"],
        ["evaluate", "--generation", questions, "--max-new-tokens", "3"],
    ):
        assert cli.main([verb[0], str(wide), *map(str, verb[1:]), "--tensor", "1"]) == 2
        out = capsys.readouterr().err
        *before, line = [line for line in out.splitlines() if "ladder-jax:" in line]
        assert all(line.startswith("ladder-jax: compiling the programs for ") for line in before)
        for part in ("out of memory", said, "more tensor ranks (--tensor) need less", "--slots"):
            assert part in line
        assert "Traceback" not in out


def test_a_text_that_needs_more_than_the_one_before(wide, monkeypatch):
    model = lj.load(wide)
    model.generate("a", max_new_tokens=1)
    monkeypatch.setattr(steps, "decode_many", lambda *_, **__: exhausted)
    with refused("out of memory generating"):
        model.generate("a", max_new_tokens=2)


def test_other_errors_stay_what_they_are(wide, monkeypatch):
    monkeypatch.setattr(weights, "_converter", failed("INTERNAL: no more of it"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        cli.main(["generate", str(wide), "--prompt", "a", "--tensor", "1"])


def test_what_cannot_be_read_is_named(wide, monkeypatch):
    """Of a checkpoint whose files are compared, too: a disk may fail in between."""
    saved = checkpoint.open_checkpoint(wide)
    definition = nn.define(saved.config.model, mesh=cases.define("ladder").layout.mesh)

    error = ValueError("Error reading x: Input/output error [os_error_code='5']")
    monkeypatch.setattr(arrays, "begin_read", failing(error))
    with pytest.raises(checkpoint.Damaged, match="damaged or incomplete: Input/output error"):
        Engine(definition, Pieces(saved, definition), slots=1, capacity=16)
    with refused(r"does not fit its configuration: layers/mlp/down is \(6, 512, 128\)"):
        other = nn.define(
            dataclasses.replace(saved.config.model, d_ff=64), mesh=definition.layout.mesh
        )
        Engine(other, Pieces(saved, other), slots=1, capacity=16)


@pytest.mark.parametrize(
    "error, kind",
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: of a device"), jax.errors.JaxRuntimeError),
        (ValueError("RESOURCE_EXHAUSTED: of the host"), MemoryError),
    ],
)
def test_memory_that_runs_out_is_no_damage(wide, monkeypatch, error, kind):
    monkeypatch.setattr(arrays, "begin_read", failing(error))
    with pytest.raises(kind, match="RESOURCE_EXHAUSTED"):
        checkpoint.open_checkpoint(wide).params(cases.define("ladder", **starts.WIDE))
