"""A small model with random weights as checkpoints of bytes and of another tokenizer's tokens, and
its exact scores.
"""

import dataclasses
import json

import numpy as np
import pytest

from ladder_jax.data.tokenizer import Bytes, load as load_tokenizer
from ladder_jax.evaluate import Model
from tests import cases, reference, starts, tokenizers

WINDOW = 64  # as `starts.save` has it


@dataclasses.dataclass(frozen=True)
class Exact:
    """Log-probabilities in float64 by the reference, which shares no code with the package."""

    params: dict
    shape: reference.Shape

    def scores(self, context, scored):
        """(the sum over `scored`, whether it is greedy), from one row [1, WINDOW], so that one
        program serves all.
        """
        whole = [*context, *scored]
        row = np.zeros((1, WINDOW), np.int32)
        row[0, : len(whole) - 1] = whole[:-1]
        places = np.arange(len(context) - 1, len(whole) - 1)
        logits = self.logits(row)[0, places]
        shifted = logits - logits.max(-1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        greedy = logits.argmax(-1) == scored
        return logprobs[np.arange(len(scored)), scored].sum(), greedy.all()

    def logits(self, row):
        """[1, WINDOW, V] for tokens [1, WINDOW]."""
        return reference.evaluate(reference.logits, self.params, row, self.shape)


def rows_of(out):
    """What a file of results holds, line by line."""
    return list(map(json.loads, out.read_text(encoding="utf-8").splitlines()))


def small(**mesh):
    return cases.define("ladder", num_layers=2, vocab_size=303, **mesh)


@pytest.fixture(scope="session")
def exact():
    definition = small()
    return Exact(cases.parameters(definition), cases.shape("ladder", definition.config, ranks=1))


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run's folder with one checkpoint, of bytes."""
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    starts.save(folder / "checkpoints", small(tensor=2))
    return folder


@pytest.fixture(scope="session")
def pieces(tmp_path_factory):
    """A tokenizer that puts a token before each text, and has one that ends it."""
    return load_tokenizer(tokenizers.folder(tmp_path_factory.mktemp("tokenizer") / "pieces"))


@pytest.fixture(scope="module")
def model(pieces):
    definition = small()
    params = cases.placed(definition)
    return Model(definition, lambda: params, pieces, WINDOW, pieces.bos_token_id)


@pytest.fixture(scope="module")
def bytes_model(model):
    return dataclasses.replace(model, tokenizer=Bytes(), prefix=10)
