"""Checks of a caller's arguments before anything is computed: a mistake would fail deep inside, or go unnoticed."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ladder_jax.errors import UserError, unknown, wrong_type
from ladder_jax.nn.model_def import ModelDef


def check_params(params: Any, *, expected: Mapping[str, Any], path: str = "params") -> None:
    """Raises UserError, naming the parameter, where names or shapes are not those of `expected`, a nested dict."""
    if not isinstance(params, Mapping):
        raise UserError(f"{path} must be a dict with {', '.join(expected)}, not a {type(params).__name__}")
    for name in params:
        if name not in expected:
            raise unknown("parameter", f"{path}.{name}", [f"{path}.{one}" for one in expected])
    for name, wanted in expected.items():
        where = f"{path}.{name}"
        if name not in params:
            raise UserError(f"{where} is missing: this model has {', '.join(expected)}")
        if isinstance(wanted, Mapping):
            check_params(params[name], expected=wanted, path=where)
        elif (shape := getattr(params[name], "shape", None)) != wanted.shape:
            raise UserError(f"{where} has the shape {shape}, and this model needs {wanted.shape}")


def check_model(definition: Any, params: Any) -> None:
    """Raises UserError for what is no ModelDef, or neither its parameters nor a function that reads them."""
    if not isinstance(definition, ModelDef):
        raise wrong_type("definition", definition, ModelDef)
    if not callable(params):
        check_params(params, expected=definition.abstract)


def checked_tokens(tokens: ArrayLike, *, batch_ranks: int, vocab_size: int) -> jax.Array | np.ndarray:
    """`tokens` [B, T] as int32; raises UserError for another shape or type, and for ids outside the vocabulary.

    Ids are checked on the host, or in an array of this process, for which the check waits; traced tokens have no values
    yet and are not checked.
    """
    if not isinstance(tokens, jax.Array):
        try:
            tokens = np.asarray(tokens)
        except ValueError:
            raise UserError("tokens must be [B, T]: these rows have different lengths") from None
    if tokens.ndim != 2 or tokens.shape[0] % batch_ranks:
        raise UserError(f"tokens must be [B, T] with B divisible by {batch_ranks}, not {tokens.shape}")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UserError(f"tokens must be integers, not {tokens.dtype}")
    if tokens.size and not isinstance(tokens, jax.core.Tracer) and getattr(tokens, "is_fully_addressable", True):
        ids = np.asarray(tokens)
        for extreme in (ids.min(), ids.max()):
            if not 0 <= extreme < vocab_size:
                raise UserError(f"token {extreme} is not in the vocabulary of {vocab_size} (0 to {vocab_size - 1})")
    return tokens if tokens.dtype == jnp.int32 else tokens.astype(jnp.int32)
