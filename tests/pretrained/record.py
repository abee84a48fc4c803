"""What transformers computes for the tiny models, and writes to logits.npz, against which
`make test` compares.

.venv-hf/bin/python -m tests.pretrained.record
"""

import pathlib
import tempfile

import numpy as np

from ladder_jax import pretrained
from tests.pretrained import ladders, models

FILE = pathlib.Path(__file__).parent / "logits.npz"


def opened(folder, **how):
    """The model in float32, by transformers."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, **how
    )
    return model.eval()


def run(model, tokens, **more):
    """What a PyTorch model gives for tokens [B, T]."""
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(tokens, dtype=torch.long), **more)


def logits(folder):
    """[2, 24, V] float32, by PyTorch on the CPU."""
    return run(opened(folder), models.tokens()).logits.numpy()


def main():
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (*models.CONFIGS, *models.EXPERTS):
            found[name] = logits(models.write(pathlib.Path(folder, name), name))
        for name in ladders.TOPOLOGIES:
            made = ladders.make(pathlib.Path(folder, f"made-{name}"), name)
            exported = pathlib.Path(folder, f"out-{name}")
            pretrained.write_huggingface(made, exported)
            found[name] = logits(exported)
    # Every third position: the last ones depend on all before them, and the file stays small.
    np.savez_compressed(FILE, **{name: of[:, 2::3] for name, of in found.items()})


if __name__ == "__main__":
    main()
