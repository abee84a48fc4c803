"""Read and write Hugging Face's format: config.json, safetensors shards, the tokenizer's files."""
