"""What several files here convert."""

import pytest

from ladder_jax import pretrained
from ladder_jax.errors import UserError
from tests.pretrained import gguf_files


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Four layers, in a GGUF file of float32."""
    return gguf_files.write(
        tmp_path_factory.mktemp("small") / "small.gguf", "llama-2", num_hidden_layers=4
    )


def refused(path, *, by=pretrained.open):
    """The one line that says why there is no such model."""
    with pytest.raises(UserError) as refusal:
        by(path)
    assert "\n" not in (message := str(refusal.value))
    assert len(message) < 700
    return message
