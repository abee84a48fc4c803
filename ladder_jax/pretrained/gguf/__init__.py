"""Read GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), llama.cpp's format."""

from ladder_jax.pretrained.gguf.read import read as read
