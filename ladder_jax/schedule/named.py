"""Compile a program with its own operation names, which the audit reads."""

import contextlib
from collections.abc import Iterator

import jax

OPTION = "jax_compilation_cache_include_metadata_in_key"


@contextlib.contextmanager
def names_in_cache_key() -> Iterator[None]:
    """Within this context, jax's persistent cache distinguishes programs by their named scopes too.

    By default its keys leave names out: a lookup may return a program of the same operations in other named scopes.
    """
    previous = getattr(jax.config, OPTION)
    jax.config.update(OPTION, True)
    try:
        yield
    finally:
        jax.config.update(OPTION, previous)
