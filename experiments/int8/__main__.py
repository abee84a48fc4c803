"""What weights of 8 bits cost in held-out loss: one trained checkpoint, stored four ways, on the same text.

    python -m experiments.int8 runs/demo/ladder [--batches 32] [--out FILE]     # after `make demo`
    python -m experiments.int8 CHECKPOINT --text FILE [--sequence 512]          # of a converted model, say

The text is the held-out part of what the run was trained on, or the first sequences of a file. Differences are to
the checkpoint in float32; their standard errors are over the batches, each of which every form scores.
"""

import argparse
import dataclasses
import pathlib

import jax
import numpy as np

from experiments import measure
from ladder_jax import checkpoint, nn, parallel
from ladder_jax.config import Dtype, Loop, Quantize
from ladder_jax.data import batches, dataset
from ladder_jax.decode import weights

FORMS = (
    ("float32", Dtype.FLOAT32, Quantize.NONE),
    ("bfloat16", Dtype.BFLOAT16, Quantize.NONE),
    ("int8, computed in float32", Dtype.FLOAT32, Quantize.INT8),
    ("int8, computed in bfloat16", Dtype.BFLOAT16, Quantize.INT8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run's folder, or one checkpoint in it")
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--text", metavar="FILE", help="score this, not the run's held-out text")
    parser.add_argument("--sequence", type=int, default=512, help="tokens of a batch of --text, which has one row")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_name("results.json"))
    args = parser.parse_args()

    saved = checkpoint.open_checkpoint(args.run)
    blocks, rows = of_file(saved, args) if args.text else held_out(saved, args), []
    for name, dtype, quantize in FORMS:
        config = dataclasses.replace(saved.config.model, dtype=dtype, residual_dtype=dtype)
        losses, best, size = score(nn.define(config, mesh=parallel.make_mesh()), saved, quantize, blocks)
        first = rows[0] if rows else {"losses": losses, "best": best}
        gap = losses - first["losses"]
        error = gap.std(ddof=1) / len(gap) ** 0.5
        row = {"weights": name, "bytes": size, "loss": losses.mean(), "difference": gap.mean(), "error": error}
        rows.append({**row, "other_token": (best != first["best"]).mean(), "losses": losses, "best": best})
    plain = [
        {k: v if isinstance(v, (str, int)) else float(v) for k, v in row.items() if np.ndim(v) == 0} for row in rows
    ]
    measure.report({"tokens_scored": rows[0]["best"].size, "batches": len(blocks), "rows": plain}, file=args.out)


def held_out(saved: checkpoint.Checkpoint, args: argparse.Namespace) -> list[np.ndarray]:
    recipe = dataclasses.replace(saved.config.train, evaluation_batches=args.batches)
    _, held_out = batches.split(dataset.read_text(saved.config.data).content, config=saved.config.data)
    return batches.held_out(held_out, config=recipe)


def of_file(saved: checkpoint.Checkpoint, args: argparse.Namespace) -> list[np.ndarray]:
    """The file's first tokens, [1, sequence + 1] a batch."""
    tokens = np.array(saved.tokenizer().encode(pathlib.Path(args.text).read_text(encoding="utf-8")), np.int32)
    size = args.sequence + 1
    count = min(args.batches, len(tokens) // size)
    return list(tokens[: count * size].reshape(count, 1, size))


def score(definition: nn.ModelDef, saved, quantize: Quantize, blocks: list) -> tuple[np.ndarray, np.ndarray, int]:
    """Each batch's loss in nats a token, the most probable token at every position, and the bytes of the weights."""
    layout, form = definition.layout, dict(loop=Loop.SCAN, quantize=quantize)
    params = weights.prepare(definition, saved.params(definition), **form)

    def local(params, tokens):
        x, _ = nn.hidden(definition, params, tokens[:, :-1])
        logits = nn.logits(definition, params, x)
        loss = nn.cross_entropy(logits, tokens[:, 1:], axes=layout.tensor)
        return loss, logits

    dims = dict(in_dims=(weights.dims(definition, **form), "BT"), out_dims=("BT", "BTV"))
    ranked = parallel.over_ranks(local, layout=layout, **dims)
    step = jax.jit(parallel.on_mesh(ranked, layout=layout, **dims))
    losses, best = [], []
    for block in blocks:  # one after the other: a large vocabulary's logits are large
        loss, logits = step(params, block)
        losses.append(np.asarray(loss).mean())
        best.append(np.asarray(logits).argmax(-1))
    return np.array(losses), np.stack(best), sum(leaf.nbytes for leaf in jax.tree.leaves(params))


if __name__ == "__main__":
    main()
