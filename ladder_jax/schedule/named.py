"""Programs read by the names in them must be compiled with those names."""

import contextlib
from collections.abc import Iterator

import jax

OPTION = "jax_compilation_cache_include_metadata_in_key"


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """What is compiled within has the names of its own scopes.

    jax's persistent cache leaves names out of its keys: it may give back what was compiled of the same operations in
    other scopes.
    """
    before = getattr(jax.config, OPTION)
    jax.config.update(OPTION, True)
    try:
        yield
    finally:
        jax.config.update(OPTION, before)
