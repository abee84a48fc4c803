"""Read GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), llama.cpp's
format.
"""

from ladder_jax.pretrained.gguf.model import read as read
