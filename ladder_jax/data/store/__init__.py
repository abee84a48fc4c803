"""A token store: documents as tokens on disk, in shards, with a manifest. Imports no jax."""

from ladder_jax.data.store.reader import Store as Store, is_store as is_store
