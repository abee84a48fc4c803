"""The input of a training step: rows packed with several documents, and their targets."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A pytree of integers [B, T + 1]; a single row's are [T + 1].

    segments: the number of each token's document within its row, from 1; 0 is padding. A token is
    predicted from the earlier tokens of its document, so the first token of a document is not
    predicted.
    loss_mask: 0 for tokens that are input only, such as a prompt's; None to predict all.
    """

    tokens: jax.Array
    segments: jax.Array
    loss_mask: jax.Array | None = None

    @property
    def predicted(self) -> jax.Array:
        """[B, T]: whether position t has a target, token t + 1."""
        before, after = self.segments[:, :-1], self.segments[:, 1:]
        same_document = (before == after) & (after != 0)
        return (
            same_document
            if self.loss_mask is None
            else same_document & (self.loss_mask[:, 1:] != 0)
        )


@dataclasses.dataclass(frozen=True)
class Targets:
    """One rank's rows: integer tokens [B, T], the next tokens as targets [B, T], and their float32
    weights [B, T].

    segments: as in `Batch`, [B, T]; None if each row is one text.
    """

    tokens: jax.Array
    targets: jax.Array
    weights: jax.Array
    segments: jax.Array | None
