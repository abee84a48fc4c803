"""The same protocol in PyTorch: Hugging Face transformers, a static cache, its decode step compiled.

    python -m experiments.one_gpu.torch_generation --batch 1,64 --out torch.json

Needs torch and transformers (the extra test-hf brings them). Random weights, greedy, on the GPU if there is one.
Prefill is a generation of one token, decoding what a generation of all takes longer.
"""

import argparse
import json
import pathlib
import platform
import statistics
import time

import torch
import transformers

from ladder_jax.bench import request as requests
from ladder_jax.bench.request import Request
from ladder_jax.config import ModelConfig

NUMBERS = ("prompt-length", "new-tokens", "warmup", "repeats", "layers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--batch", default="1,64")
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = vars(parser.parse_args())
    out = args.pop("out")
    request = requests.make(residual="standard", tensor=1, **args)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(request.config("standard"), device=device)
    found = {
        "model": request.model,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": [row(request, model, batch=batch) for batch in request.batches],
    }
    out.write_text(json.dumps(found, indent=2) + "\n")


def random_model(config: ModelConfig, *, device: str) -> transformers.LlamaForCausalLM:
    """Of `config`'s shape, in bfloat16, with a head of its own or the embedding's."""
    shape = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=131072,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()


def row(request: Request, model: transformers.LlamaForCausalLM, *, batch: int) -> dict:
    """Medians, with the range over the repeats beside them."""
    prompt = torch.randint(model.config.vocab_size, (batch, request.prompt_length), device=model.device)
    once = lambda: [seconds(model, prompt, count=count) for count in (1, request.new_tokens)]
    timed = [once() for _ in range(request.warmup + request.repeats)][request.warmup :]
    samples = {
        "prefill_seconds": [prefill for prefill, _ in timed],
        "decode_seconds": [total - prefill for prefill, total in timed],
        "tokens_per_second": [batch * request.new_tokens / total for _, total in timed],
    }
    found = dict(batch=batch, prompt_length=request.prompt_length, new_tokens=request.new_tokens)
    for name, each in samples.items():
        found |= {name: statistics.median(each), f"{name}_min": min(each), f"{name}_max": max(each)}
    return found


def seconds(model: transformers.LlamaForCausalLM, prompt: torch.Tensor, *, count: int) -> float:
    """What it takes to generate `count` tokens a row; transformers compiles the step where the device gains by it."""
    wait = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            cache_implementation="static",
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
        )
    wait()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
