"""Against PyTorch and transformers as they are installed: `make test-hf`."""

import dataclasses
import json

import numpy as np
import pytest

from ladder_jax import pretrained
from tests import cases, tokenizers
from tests.pretrained import ladders, models, record
from tests.pretrained.record import run
from tests.pretrained.test_in import logits, recorded

# Their own warnings, of deprecations between them, are not ours to fail for.
pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]
BOUND = 1e-4  # of the logits' scale


def in_and_out(name, tmp_path):
    """What a model's folder gives: logits, as they are recorded, our Source, and the plain model
    that is written of it, to "out".
    """
    folder = models.write(tmp_path / "model", name)
    out = tmp_path / "out"
    live = record.logits(folder)
    source = pretrained.open(folder)
    assert cases.error(live[:, 2::3], recorded()[name]) <= 1e-5, "run tests/pretrained/record.py"
    pretrained.write_huggingface(source, out)
    model = record.opened(out)
    assert type(model).__module__.startswith("transformers.models.")
    return live, source, model


@pytest.mark.parametrize("name", models.CONFIGS)
def test_standard_models_in_and_out(name, tmp_path, monkeypatch):
    """We compute the same; what is written is plain, and computes exactly the same."""
    monkeypatch.setattr("ladder_jax.pretrained.huggingface.folder.SHARD_BYTES", 30_000)
    live, source, model = in_and_out(name, tmp_path)
    assert cases.error(logits(source), live) <= BOUND
    assert model.generation_config.eos_token_id == [2, 5]
    assert np.array_equal(record.logits(tmp_path / "out"), live)


@pytest.mark.parametrize("name", models.EXPERTS)
def test_experts_in_and_out(name, tmp_path):
    """What is written is a class of transformers, which computes the same."""
    live, source, model = in_and_out(name, tmp_path)
    # PyTorch's own sums depend on alignment
    assert cases.error(record.logits(tmp_path / "out"), live) <= 1e-6
    model.save_pretrained(tmp_path / "saved")  # by transformers' own choice of names
    again = pretrained.open(tmp_path / "saved")
    assert again.model == source.model
    models.same_arrays(again, source)


@pytest.fixture(scope="module", params=ladders.TOPOLOGIES)
def exported(request, tmp_path_factory):
    """(name, our Source, the folder that was written of it, the PyTorch model in it)"""
    folder = tmp_path_factory.mktemp("exported")
    made = ladders.make(folder / "made", request.param)
    pretrained.write_huggingface(made, folder / "out")
    return request.param, made, folder / "out", record.opened(folder / "out")


def test_prefill_decode_and_left_padding(exported):
    import torch

    name, made, _, model = exported
    ours = logits(made)
    tokens = models.tokens()
    assert cases.error(ours[:, 2::3], recorded()[name]) <= BOUND
    assert cases.error(run(model, tokens).logits, ours) <= BOUND

    step = run(model, tokens[:, :9])
    seen = []
    for at in range(9, tokens.shape[1]):
        seen.append(step.logits[:, -1])
        step = run(model, tokens[:, at : at + 1], past_key_values=step.past_key_values)
    assert cases.error(torch.stack(seen, 1), ours[:, 8:-1]) <= BOUND

    # Two rows of different lengths: the second ends where the first does, and begins with padding.
    long = tokens[0]
    short = tokens[1, :15]
    batch = np.stack([long, np.concatenate([np.zeros(9), short])])
    mask = np.ones((2, 24))
    mask[1, :9] = 0
    padded = run(model, batch, attention_mask=torch.as_tensor(mask)).logits
    assert torch.isfinite(padded).all()
    assert cases.error(padded[0], ours[0]) <= BOUND
    assert cases.error(padded[1, 9:], ours[1, :15]) <= BOUND


def test_generate(exported):
    """With and without a cache, in a padded batch, and by beams."""
    import torch

    *_, model = exported
    prompt = torch.as_tensor(models.tokens()[:1, :10], dtype=torch.long)
    settings = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = model.generate(prompt, **settings)[0, 10:]
    assert torch.equal(model.generate(prompt, use_cache=False, **settings)[0, 10:], found)
    rows = torch.cat(
        [torch.cat([torch.zeros(1, 4), prompt], 1), torch.as_tensor(models.tokens()[1:, :14])]
    ).long()
    mask = (torch.arange(14)[None] >= torch.tensor([[4], [0]])).long()
    assert torch.equal(model.generate(rows, attention_mask=mask, **settings)[0, 14:], found)
    assert model.generate(prompt, num_beams=3, **settings).shape == (1, 22)


def test_offloaded(exported, tmp_path):
    """accelerate reads a module's weights from the disk when the module is called."""
    _, made, folder, _ = exported
    model = record.opened(folder, device_map={"": "disk"}, offload_folder=str(tmp_path))
    assert cases.error(run(model, models.tokens()).logits, logits(made)) <= BOUND


def test_fine_tuned_and_back(exported, tmp_path):
    """A step of SGD in PyTorch, save_pretrained, and in again."""
    import torch

    _, made, folder, _ = exported
    model = record.opened(folder).train()
    tokens = torch.as_tensor(models.tokens(), dtype=torch.long)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.01 * parameter.grad
        assert model(tokens, labels=tokens).loss < loss
    model.save_pretrained(tmp_path / "tuned")
    again = pretrained.open(tmp_path / "tuned")
    assert again.arrays.keys() == made.arrays.keys()
    assert cases.error(run(model.eval(), models.tokens()).logits, logits(again)) <= BOUND


def test_bfloat16_tokenizer_and_consent(tmp_path):
    import ml_dtypes
    import torch
    import transformers

    made = ladders.make(tmp_path / "made", "ladder", vocab_size=320, values=ml_dtypes.bfloat16)
    out = tmp_path / "out"
    read = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer = tokenizers.byte_level()
    made = dataclasses.replace(made, files={"tokenizer.json": tokenizer.to_str().encode()})
    pretrained.write_huggingface(made, out)
    model = read(out, trust_remote_code=True)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [2, 5]
    rounded = run(model, models.tokens()).logits.float().numpy()
    assert cases.error(rounded, record.logits(out)) < 0.1
    # runs no program
    there = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    text = "the cat sat on the mat"
    assert there(text)["input_ids"] == tokenizer.encode(text).ids
    with pytest.raises(ValueError, match="trust_remote_code"):
        read(out, trust_remote_code=False)
    told = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**told, "residual": "ladder-fresh"}))
    with pytest.raises(ValueError, match="unknown residual 'ladder-fresh'"):
        read(out, trust_remote_code=True)
