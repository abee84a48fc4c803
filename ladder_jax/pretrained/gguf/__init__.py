"""GGUF in: llama.cpp's files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), by the package `gguf`."""

from ladder_jax.pretrained.gguf.read import read as read
