"""What a collective is for, in words: by the scope in which the library communicates, else by what it does."""

from ladder_jax.parallel.collectives import (
    CHOICE,
    DATA_GRADIENTS,
    DIVERGENCE,
    EMBEDDING,
    GATHER,
    GRADIENT_NORM,
    HEAD,
    LOSS,
    SCATTER,
    SHARED_GRADIENTS,
)
from ladder_jax.parallel.mesh import DATA, FSDP
from ladder_jax.schedule.collectives import Collective

SHARED = "gradients of norm gains and other replicated weights"
REDUCED = "data-parallel gradients"
WORDS = {  # the first that is found
    CHOICE: "choice of the token",
    EMBEDDING: "embedding",
    DIVERGENCE: "distillation",
    LOSS: "loss",
    HEAD: "gradient of the head's input",
    GRADIENT_NORM: "gradient norm",
    SHARED_GRADIENTS: SHARED,
    DATA_GRADIENTS: REDUCED,
    GATHER: "weights outside the layers",
    SCATTER: "gradients of weights outside the layers",
}


def purpose(collective: Collective) -> str:
    """Several, with commas, where the compiler joined them: it writes their names as `(a:b)`, or keeps the first."""
    found = [_words(part) for part in collective.op_name.split(":")]
    found += [_words(part) or _gradients(part, collective) for part in collective.joined]
    if named := [words for words in dict.fromkeys(found) if words]:
        return ", ".join(named)
    if words := _gradients(collective.op_name, collective):
        return words
    if not collective.op_name and collective.axes == (FSDP,) and collective.kind in ("all-gather", "reduce-scatter"):
        return WORDS[GATHER if collective.kind == "all-gather" else SCATTER]
    return f"other: {collective.op_name or collective.name}"


def _gradients(op_name: str, collective: Collective) -> str | None:
    """Of a backward pass, a user's too: the transpose of what is equal on all ranks is a sum over them."""
    if "transpose(" not in op_name or collective.kind != "all-reduce":
        return None
    return REDUCED if collective.axes and set(collective.axes) <= {DATA, FSDP} else SHARED


def _words(op_name: str) -> str | None:
    return next((words for scope, words in WORDS.items() if scope in op_name), None)
