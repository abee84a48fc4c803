"""What a training step reads: rows of tokens from several documents, and the targets in them."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """tokens, segments: [B, T + 1] integers (one row's: [T + 1]), a pytree.

    segments: which document of its row a token belongs to, counted from 1; 0 is padding. A token is
    predicted from those of its own document before it: each document's first is predicted by none.
    learnt: likewise, 0 for tokens that are read and not predicted, such as a prompt's; without it all are.
    """

    tokens: jax.Array
    segments: jax.Array
    learnt: jax.Array | None = None

    @property
    def predicted(self) -> jax.Array:
        """[B, T]: whether token t + 1 is predicted, from t and what it sees."""
        before, after = self.segments[:, :-1], self.segments[:, 1:]
        follows = (before == after) & (after != 0)
        return follows if self.learnt is None else follows & (self.learnt[:, 1:] != 0)


@dataclasses.dataclass(frozen=True)
class Targets:
    """Of a rank's rows: integer tokens [B, T], the next tokens as targets [B, T], and their float32 weights [B, T].

    segments: as in `Batch`, [B, T]; None where each row is one text.
    """

    tokens: jax.Array
    targets: jax.Array
    weights: jax.Array
    segments: jax.Array | None
