"""Grouped matmuls of experts on one device, one rank's share of a model: our kernel, XLA's form,
batched matmuls.

    python -m experiments.one_gpu.experts --model qwen3-30b-a3b --share 8 --out experts.json

Three products: of rows (forward), of their gradients, and over rows (a weight's gradient). `kernel`
is nn/grouped_gpu.py, `xla` is `lax.ragged_dot`, which XLA expands to every expert for every row;
`batched` is cuBLAS on as many rows in groups of equal sizes, which no router yields: about the
least there is. Each result is compared with float64 products group by group: one that is off, or
failed, ends the program with status 1.
"""

import functools
import itertools
import pathlib
import statistics
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from experiments import study
from ladder_jax import config, parallel
from ladder_jax.nn import grouped, grouped_gpu

COUNT = 20  # products in one program, so that its launch is no part of a time
LIMIT = 2.0**-7  # relative, of sums in float32 that are rounded to bfloat16
FORMS = ("kernel", "xla", "batched")
# group by group
PRODUCTS = {"forward": "eri,eio->ero", "of-rows": "ero,eio->eri", "over-rows": "eri,ero->eio"}


def main() -> int:
    parser = study.parser(__doc__, name="one_gpu.experts")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument(
        "--share", type=int, default=8, help="ranks that the experts are split over"
    )
    parser.add_argument("--tokens", default="1,32,2048")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    found = []
    wrong = []
    settings = dict(share=args.share, repeats=args.repeats)
    for tokens, product, form in itertools.product(args.tokens.split(","), PRODUCTS, FORMS):
        case = dict(tokens=int(tokens), product=product, form=form)
        try:
            row = measured(args.model, **case, **settings)
        # of one form, whose compiler may fail: the others are measured all the same
        except Exception as error:
            row = {"failed": str(error)[:1000]}
        found.append(case | row)
        if not row.get("error", np.nan) < LIMIT:
            wrong.append(f"{form} {product} {tokens}")
    study.keep(
        {**study.environment(), "model": args.model, "share": args.share, "rows": found},
        file=args.out,
    )
    if wrong:
        print("failed or wrong:", *wrong, file=sys.stderr)
    return int(bool(wrong))


def measured(model: str, *, share: int, tokens: int, form: str, product: str, repeats: int) -> dict:
    """The median seconds of one form of a product, its FLOPs, and its relative error."""
    settings = config.preset(model)
    rng = np.random.default_rng(0)
    moe, held = settings.moe, -(-settings.moe.experts // share)
    inner = settings.d_model
    outer = 2 * moe.expert_width
    rows = tokens * moe.top_k
    sizes = np.bincount(rng.integers(0, held * share, rows), minlength=held)[:held].astype(np.int32)
    sizes[0] = max(sizes[0], 1)
    if form == "batched":
        each = -(-int(sizes.sum()) // held)
        sizes = np.full(held, each, np.int32)
        rows = held * each
    of = {"eri": (rows, inner), "ero": (rows, outer), "eio": (held, inner, outer)}
    inputs, _ = PRODUCTS[product].split("->")
    arrays = [
        jnp.asarray(rng.standard_normal(of[name], np.float32), jnp.bfloat16)
        for name in inputs.split(",")
    ]
    compute = functools.partial(_on_device, _form(form, product), jnp.asarray(sizes), *arrays)
    exact = _exact(product, *arrays, sizes=sizes)
    out = np.asarray(compute(count=1), np.float64)[: len(exact)]  # rows beyond are of no group
    times = [study.seconds(lambda: compute(count=COUNT)) / COUNT for _ in range(repeats + 1)][1:]
    return {
        "rows": int(sizes.sum()),
        "chosen_experts": int(np.count_nonzero(sizes)),
        "seconds": statistics.median(times),
        "flops": 2 * int(sizes.sum()) * inner * outer,
        "error": float(np.linalg.norm(out - exact) / np.linalg.norm(exact)),
    }


def _form(form: str, product: str) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """The product of two arrays and the groups' sizes."""
    if form == "kernel":
        interpret = jax.default_backend() == "cpu"
        if product == "over-rows":
            return functools.partial(grouped_gpu.over_rows, interpret=interpret)
        return functools.partial(
            grouped_gpu.product, transposed=product == "of-rows", interpret=interpret
        )
    if form == "xla":
        return {
            "forward": lax.ragged_dot,
            "of-rows": lambda dy, weight, sizes: lax.ragged_dot(dy, weight.swapaxes(1, 2), sizes),
            "over-rows": lambda x, dy, sizes: lax.ragged_dot_general(
                x, dy, sizes, grouped.OVER_ROWS
            ),
        }[product]

    def batched(left, right, sizes):
        by_group = lambda a: a if a.ndim == 3 else a.reshape(len(sizes), -1, a.shape[-1])
        out = jnp.einsum(PRODUCTS[product], by_group(left), by_group(right))
        return out if product == "over-rows" else out.reshape(-1, out.shape[-1])

    return batched


@functools.partial(jax.jit, static_argnums=0, static_argnames="count")
def _on_device(
    form: Callable, sizes: jax.Array, left: jax.Array, right: jax.Array, *, count: int
) -> jax.Array:
    """The product `count` times, each after the one before it."""
    local = jax.shard_map(
        form, mesh=parallel.make_mesh(), in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )

    def again(_, carry):
        left, out = carry
        after = jnp.where(out.reshape(-1)[0] > 1e30, 1, 0)  # never, which the compiler cannot know
        return left.at[0, 0].add(after.astype(left.dtype)), local(left, right, sizes)

    return lax.fori_loop(1, count, again, (left, local(left, right, sizes)))[1]


def _exact(product: str, left: jax.Array, right: jax.Array, *, sizes: np.ndarray) -> np.ndarray:
    """The rows of all groups, or each group's matrix, in float64."""
    left, right = (np.asarray(a, np.float64) for a in (left, right))
    spec = PRODUCTS[product].replace("e", "")
    parts = []
    for group, (size, stop) in enumerate(zip(sizes, np.cumsum(sizes))):
        of_group = [a[group] if a.ndim == 3 else a[stop - size : stop] for a in (left, right)]
        parts.append(np.einsum(spec, *of_group, optimize=True))
    return np.stack(parts) if product == "over-rows" else np.concatenate(parts)


if __name__ == "__main__":
    sys.exit(main())
