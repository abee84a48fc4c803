"""The verbs, in the order in which `--help` lists them. A verb imports slow modules only when it runs."""

from ladder_jax.cli.verbs import (
    bench,
    calibrate,
    checkpoints,
    convert,
    doctor,
    evaluate,
    generate,
    overlap,
    plan,
    predict,
    serve,
    split,
    tokenize,
    train,
)

VERBS = {
    "doctor": doctor,
    "train": train,
    "checkpoints": checkpoints,
    "convert": convert,
    "tokenize": tokenize,
    "split": split,
    "generate": generate,
    "evaluate": evaluate,
    "serve": serve,
    "overlap": overlap,
    "plan": plan,
    "bench": bench,
    "predict": predict,
    "calibrate": calibrate,
}
