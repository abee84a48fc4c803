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


def logits(folder: pathlib.Path) -> np.ndarray:
    """[2, 24, V] float32, by PyTorch on the CPU."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    )
    with torch.no_grad():
        return model.eval()(torch.tensor(models.tokens(), dtype=torch.long)).logits.numpy()


def experts(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and the load-balancing losses [1 + L]: the model's own, and then of each layer
    alone.
    """
    import sys

    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss_of = sys.modules[type(model).__module__].load_balancing_loss_func
    count = (model.num_experts, model.num_experts_per_tok)
    with torch.no_grad():
        out = model.eval()(
            torch.tensor(models.tokens(), dtype=torch.long), output_router_logits=True
        )
        losses = [out.aux_loss, *(loss_of((layer,), *count) for layer in out.router_logits)]
    return out.logits.numpy(), np.array(losses, np.float32)


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in models.CONFIGS:
            found[name] = logits(models.write(pathlib.Path(folder, name), name))
        for name in models.EXPERTS:
            found[name], found[f"{name} losses"] = experts(
                models.write(pathlib.Path(folder, name), name)
            )
        for name in ladders.TOPOLOGIES:
            made = ladders.make(pathlib.Path(folder, f"made-{name}"), name)
            exported = pathlib.Path(folder, f"out-{name}")
            pretrained.write_huggingface(made, exported)
            found[name] = logits(exported)
    # Every third position: the last ones depend on all before them, and the file stays small.
    kept = {name: of[:, 2::3] if of.ndim > 1 else of for name, of in found.items()}
    np.savez_compressed(FILE, **kept)


if __name__ == "__main__":
    main()
