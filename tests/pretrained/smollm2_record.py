"""What transformers and PyTorch compute of SmolLM2's GGUF file; writes smollm2.npz, which
`make test` compares with.

.venv-hf/bin/python -m tests.pretrained.smollm2_record
"""

import functools
import pathlib

import numpy as np

from tests.pretrained import record, smollm2

FILE = pathlib.Path(__file__).parent / "smollm2.npz"
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a small robot who",
    "Water boils at a temperature of",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
)
NEW_TOKENS = 64
TEXT = pathlib.Path(__file__).parent.parent.parent / "LICENSE"
COLUMNS = slice(None, None, 97)  # of the vocabulary that are kept


@functools.cache
def model():
    """In float32, by transformers' own reading of the file."""
    file = smollm2.file()
    return record.opened(file.parent, gguf_file=file.name)


def logits(tokens):
    """[B, T, V] of tokens [B, T]."""
    return record.run(model(), tokens).logits.numpy()


def greedy(prompt):
    import torch

    with torch.no_grad():
        out = model().generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt))),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
    return out[0, len(prompt) :].tolist()


def known(tokenizer):
    """[1, 32] tokens of the licence's text."""
    return np.array([tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:32]], np.int32)


def main():
    from tests.pretrained.test_smollm2 import tokenizer

    read = tokenizer()
    prompts = [read.encode(prompt) for prompt in PROMPTS]
    found = {f"prompt_{n}": np.array(prompt, np.int32) for n, prompt in enumerate(prompts)}
    found |= {f"greedy_{n}": np.array(greedy(prompt), np.int32) for n, prompt in enumerate(prompts)}
    found["logits"] = logits(known(read))[0, 3::4, COLUMNS]
    np.savez_compressed(FILE, **found)


if __name__ == "__main__":
    main()
