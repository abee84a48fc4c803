"""A tokenizer with a chat template, and the command with it: its own entry point, as a process."""

import dataclasses
import sys

from ladder_jax.checkpoint import Checkpoint
from ladder_jax.cli import main
from ladder_jax.data.tokenizer import Bytes
from ladder_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Templated(Bytes):
    """Bytes with a template; a text ends at a newline."""

    stop_ids: tuple[int, ...] = (10,)
    has_chat: bool = True

    def chat(self, messages, *, now=None):
        if messages[-1]["role"] == "assistant":
            raise UserError("the chat template refuses these messages: the last is not the user's")
        return self.encode(
            "".join(f"{one['role'][0]}:{one['content']}|" for one in messages) + "a:"
        )


if __name__ == "__main__":
    Checkpoint.tokenizer = lambda self: Templated()
    sys.exit(main())
