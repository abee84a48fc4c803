"""Where the time goes from a model's file to its first token, in a new process and without a compilation cache.

    python -m experiments.first_token MODEL.gguf [--out FILE]

Seconds of each stage, of the wall and of processors: on a machine that does other work the wall's say little.
"""

import argparse
import os
import pathlib
import time

HERE = pathlib.Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json")
    args = parser.parse_args()
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    rows, before = [], (0.0, time.perf_counter())  # the processor's seconds count from the process's start

    def done(stage: str) -> None:
        nonlocal before
        now = time.process_time(), time.perf_counter()
        spent = [round(b - a, 2) for a, b in zip(before, now)]
        rows.append({"stage": stage, "cpu_seconds": spent[0], "seconds": spent[1]})
        before = now

    import jax

    from experiments import measure
    from ladder_jax import pretrained
    from ladder_jax.config import DecodeConfig
    from ladder_jax.decode import Request

    done("import")
    opened = pretrained.open_model(args.model)
    tokenizer = opened.tokenizer()
    done("open the file, make its tokenizer")
    generator = opened.generator(settings=DecodeConfig())
    jax.block_until_ready(generator.params)
    done("read the weights, lay them out")
    pieces = generator.pieces(Request(tokenizer.encode("Once upon a time"), max_new_tokens=17))
    next(pieces)
    done("compile the prefill, run it: the first token")
    next(pieces)
    done("compile the decode loop, run it: 16 more")
    measure.report({"rows": rows}, file=args.out)


if __name__ == "__main__":
    main()
