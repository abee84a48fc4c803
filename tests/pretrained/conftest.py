"""What several files here convert."""

import pytest

from tests.pretrained import gguf_files


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Four layers, in a GGUF file of float32."""
    return gguf_files.write(tmp_path_factory.mktemp("small") / "small.gguf", "llama-2", num_hidden_layers=4)
