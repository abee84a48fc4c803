"""The purpose of a collective as a phrase: from the library's named scope, or else from its kind and axes."""

from ladder_jax.parallel.collectives import (
    CHOICE,
    DATA_GRADIENTS,
    DIVERGENCE,
    EMBEDDING,
    GATHER,
    GRADIENT_NORM,
    HEAD,
    LOSS,
    QK_NORM,
    SCATTER,
    SHARED_GRADIENTS,
)
from ladder_jax.parallel.mesh import DATA, FSDP
from ladder_jax.schedule.collectives import Collective

REPLICATED_GRADIENTS = "gradients of norm gains and other replicated weights"
DATA_PARALLEL_GRADIENTS = "data-parallel gradients"
PURPOSES = {  # by named scope; the first scope that the name contains counts
    CHOICE: "choice of the token",
    EMBEDDING: "embedding",
    DIVERGENCE: "distillation",
    LOSS: "loss",
    QK_NORM: "query and key norms over all heads",
    HEAD: "gradient of the head's input",
    GRADIENT_NORM: "gradient norm",
    SHARED_GRADIENTS: REPLICATED_GRADIENTS,
    DATA_GRADIENTS: DATA_PARALLEL_GRADIENTS,
    GATHER: "weights outside the layers",
    SCATTER: "gradients of weights outside the layers",
}


def purpose(collective: Collective) -> str:
    """The purpose of a collective; of one that the compiler merged, all purposes, separated by commas.

    A compiler writes the names of merged collectives as `(a:b)`, or keeps the first one only.
    """
    phrases = [_scope_purpose(part) for part in collective.op_name.split(":")]
    phrases += [_scope_purpose(part) or _gradient_purpose(part, collective) for part in collective.operand_op_names]
    if purposes := [phrase for phrase in dict.fromkeys(phrases) if phrase]:
        return ", ".join(purposes)
    if phrase := _gradient_purpose(collective.op_name, collective):
        return phrase
    if not collective.op_name and collective.axes == (FSDP,) and collective.kind in ("all-gather", "reduce-scatter"):
        return PURPOSES[GATHER if collective.kind == "all-gather" else SCATTER]
    return f"other: {collective.op_name or collective.name}"


def _gradient_purpose(op_name: str, collective: Collective) -> str | None:
    """The purpose of a backward pass's all-reduce: it sums the gradient of an array that is equal on all ranks."""
    if "transpose(" not in op_name or collective.kind != "all-reduce":
        return None
    data_axes = collective.axes and set(collective.axes) <= {DATA, FSDP}
    return DATA_PARALLEL_GRADIENTS if data_axes else REPLICATED_GRADIENTS


def _scope_purpose(op_name: str) -> str | None:
    return next((phrase for scope, phrase in PURPOSES.items() if scope in op_name), None)
