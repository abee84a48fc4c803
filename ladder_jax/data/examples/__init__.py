"""Examples in JSON lines, each with a loss mask: chats, prompts with completions, texts."""

from ladder_jax.data.examples.rows import ExampleRows as ExampleRows
from ladder_jax.data.examples.rows import Examples as Examples
from ladder_jax.data.examples.rows import load as load
