"""Hugging Face's format in and out: config.json, safetensors shards, the tokenizer's files."""
