"""Programs that were compiled before: jax's compilation cache, on unless the user has decided otherwise."""

import os

import jax

from ladder_jax import files


def use_compilation_cache() -> None:
    """For the rest of this process; jax.config.jax_compilation_cache_dir and its environment variable go before."""
    if jax.config.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        if (folder := files.cache_folder("programs")) is not None:
            jax.config.update("jax_compilation_cache_dir", str(folder))
