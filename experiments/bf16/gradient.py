"""One gradient in bfloat16 against float32: of every parameter, and of the row of a byte that makes up 40 % of a batch.

    python -m experiments.bf16.gradient                       # a minute or two; writes gradient.json
    python -m experiments.bf16.gradient --before CHECKOUT     # adds what an earlier commit's checkout computes

`tiny` with its initial values, 16 rows of 1,024 bytes, on one CPU device.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
RESULTS, ROOT = HERE / "gradient.json", HERE.parent.parent
COMMON, SHARE, SHAPE = 32, 0.4, (16, 1025)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=pathlib.Path, metavar="CHECKOUT", help="of the commit to compare with")
    args = parser.parse_args()
    root, name = args.before or ROOT, "now"
    if args.before:
        asked = ["git", "rev-parse", "--short", "HEAD"]
        name = subprocess.run(asked, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    done = subprocess.run(
        [sys.executable, str(pathlib.Path(__file__).resolve()), "measure"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(root.resolve())},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**kept, name: json.loads(done.stdout)}, indent=1) + "\n")
    print(done.stdout)


def measure() -> dict:
    """Relative errors, in the norm over each array, of the `ladder_jax` that is imported."""
    import jax
    import numpy as np

    import ladder_jax
    from ladder_jax import nn, train
    from ladder_jax.config import Dtype

    rng = np.random.default_rng(0)
    tokens = np.where(rng.random(SHAPE) < SHARE, COMMON, rng.integers(0, 256, SHAPE)).astype(np.int32)
    gradients = {}
    for dtype in Dtype:
        config = ladder_jax.preset("tiny", dtype=dtype, residual_dtype=dtype)
        definition = nn.define(config, mesh=ladder_jax.make_mesh())
        compute = jax.jit(train.loss_and_gradients(definition))
        _, found = compute(nn.initialize(definition, seed=0), tokens)
        gradients[dtype] = {
            jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(found)
        }
    exact, ours = gradients[Dtype.FLOAT32], gradients[Dtype.BFLOAT16]
    error = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))
    table = "['embedding']['table']"
    return {
        "jax": jax.__version__,
        "common_row": error(ours[table][COMMON], exact[table][COMMON]),
        "parameters": {name: error(ours[name], exact[name]) for name in exact},
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1)) if sys.argv[1:] == ["measure"] else main()
