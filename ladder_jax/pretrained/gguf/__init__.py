"""GGUF in: the files of llama.cpp (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), by the package `gguf`."""

from ladder_jax.pretrained.gguf.read import read as read
