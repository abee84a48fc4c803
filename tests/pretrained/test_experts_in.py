"""Hugging Face models with experts: logits as transformers computes them, and every spelling."""

import ml_dtypes
import numpy as np
import pytest

from ladder_jax import pretrained
from ladder_jax.config import Biases, QKNorm, RouterSoftmax
from tests.covering import full
from tests.pretrained import models
from tests.pretrained.models import EXPERTS, write
from tests.pretrained.test_convert import convert, restored
from tests.pretrained.test_in import check_logits


# Another family has a dense layer before the experts of "qwen3_moe".
@pytest.mark.parametrize(
    "name",
    [full(name) if name == "qwen3_moe" else name for name in EXPERTS],
)
def test_logits_are_those_of_transformers(name, tmp_path):
    check_logits(pretrained.open(write(tmp_path / "model", name)), name)


def test_spellings_of_the_configuration(tmp_path):
    def model(name, **changes):
        return pretrained.open(write(tmp_path / f"{name} {changes}", name, **changes)).model

    old = model("qwen3_moe")
    assert old == model("qwen3_moe of transformers 5", norm_topk_prob=True)
    assert (old.qk_norm, old.moe.expert_width, old.moe.shared_width) == (QKNorm.HEAD, 16, 0)
    assert model("qwen3_moe", norm_topk_prob=False).moe.softmax is RouterSoftmax.ALL
    qwen2 = model("qwen2_moe")
    assert (qwen2.biases, qwen2.moe.shared_width, qwen2.moe.shared_gate) == (Biases.QKV, 40, True)
    assert model("mixtral").moe.expert_width == 24
    # transformers' class does not read the field
    assert model("mixtral", norm_topk_prob=False).moe.softmax is RouterSoftmax.CHOSEN
    assert model("olmoe").qk_norm is QKNorm.ALL


def test_a_checkpoint_onto_ranks_that_do_not_divide(tmp_path):
    """Its last layer farskip; six experts on four ranks, padded, and on one."""
    folder = write(tmp_path / "model", "qwen2_moe", values=ml_dtypes.bfloat16)
    source = pretrained.open(folder)
    saved = convert(folder, tmp_path / "out", ladder_layers="1", residual="farskip")
    models.same_arrays(pretrained.open(tmp_path / "out"), source)
    one, four = (
        np.asarray(restored(saved, tensor=ranks)["layers"]["mlp"]["experts"]["down"])
        for ranks in (1, 4)
    )
    assert four.shape == (2, 8, 16, 32)
    assert np.array_equal(four[:, :6], one)
    assert not four[:, 6:].any()
    down = source.arrays["layers/mlp/experts/down", 1].read()
    assert np.array_equal(one[1], down.astype(np.float32))
