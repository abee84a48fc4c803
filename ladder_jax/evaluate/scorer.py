"""Log-likelihoods of many token sequences, in batches of few shapes, and the program that computes
them.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax import lax

from ladder_jax import nn
from ladder_jax.config import SCANNED, Phase
from ladder_jax.decode import sampling, steps
from ladder_jax.decode.generate import parts_of
from ladder_jax.decode.request import check_prompts
from ladder_jax.errors import RunFailed, UserError, whole
from ladder_jax.nn import ModelDef, Params, Transformer
from ladder_jax.parallel import Compiled, cache_programs

# rows are padded to this or to a power of two above it, so that few programs are compiled
SHORTEST = 32
BATCH_TOKENS = 4096  # of a batch, padding included
# positions, B x T, whose float32 logits are there at once: 0.3 GB of a vocabulary of 128k, if not
# split
CHUNK = 512


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens to be scored, and what stands before them; at least one of each."""

    context: Sequence[int]
    scored: Sequence[int]

    def __post_init__(self):
        if not (len(self.context) and len(self.scored)):
            raise UserError("a score needs at least one token, and one before it")

    @property
    def length(self) -> int:
        """How many tokens the model reads for it: all but the last."""
        return len(self.context) + len(self.scored) - 1


@dataclasses.dataclass(frozen=True)
class Score:
    """logprobs: each scored token's log-probability, in nats; greedy: whether each is the most
    probable one.
    """

    logprobs: np.ndarray
    greedy: bool

    @property
    def loglikelihood(self) -> float:
        """The sum, in float64."""
        return float(self.logprobs.sum(dtype=np.float64))


class Scorer:
    """Scores spans on a model's mesh: `for index, score in Scorer(model).scores(spans)`.

    params: those of a ModelDef, float32 as stored or in the compute dtype; a Transformer has its
        own.
    batch_tokens: the most tokens of a batch, padding included. The longest spans come first, so
    that a device's memory suffices for all if it does for the first batch.
    """

    def __init__(
        self,
        model: Transformer | ModelDef,
        params: Params | None = None,
        *,
        batch_tokens: int = BATCH_TOKENS,
    ):
        self.definition, self.params = parts_of(model, params)
        self.batch_tokens = whole("batch_tokens", batch_tokens, least=1)
        self._sharding = self.definition.layout.sharding("BT")
        self._program = compiled_scores(self.definition)

    def scores(self, spans: Sequence[Span]) -> Iterator[tuple[int, Score]]:
        """(index, score) of every span, the longest first.

        Raises UserError for a token outside the vocabulary, RunFailed where a score is no number.
        """
        vocab_size = self.definition.config.vocab_size
        for span in spans:
            check_prompts([(*span.context, *span.scored)], vocab_size=vocab_size)
        pending = None
        for batch in [*self._batches(spans), None]:
            sent = batch and self._send(*batch, spans)
            if pending:  # is read while the next is computed
                yield from _read(*pending, spans)
            pending = sent

    def _batches(self, spans: Sequence[Span]) -> Iterator[tuple[list[int], int, int]]:
        """(indices, rows, length) of each batch; those of one length all have as many rows."""
        order = sorted(range(len(spans)), key=lambda index: -spans[index].length)
        ranks = self.definition.layout.batch_ranks
        for length, group in itertools.groupby(
            order, key=lambda index: _padded(spans[index].length)
        ):
            indices = list(group)
            count = len(indices)
            room = max(1, self.batch_tokens // length)
            most = min(room, _power_of_two(count))
            rows = max(ranks, most // ranks * ranks)
            for first in range(0, count, rows):
                yield indices[first : first + rows], rows, length

    def _send(self, indices: list[int], rows: int, length: int, spans: Sequence[Span]):
        tokens, targets = np.zeros((2, rows, length), np.int32)
        for row, index in enumerate(indices):
            span = spans[index]
            whole = [*span.context, *span.scored]
            tokens[row, : span.length] = whole[:-1]
            targets[row, : span.length] = whole[1:]
        return indices, self._program(
            self.params, *jax.device_put((tokens, targets), self._sharding)
        )


def _read(indices: list[int], computed: tuple[jax.Array, jax.Array], spans: Sequence[Span]):
    logprobs, greedy = map(np.asarray, computed)
    for row, index in enumerate(indices):
        span = spans[index]
        end = span.length
        begin = end - len(span.scored)
        found = logprobs[row, begin:end]
        if not np.isfinite(found).all():
            raise RunFailed(
                "the model's log-probabilities are no numbers: its weights are not, or they overflow"
            )
        yield index, Score(found, bool(greedy[row, begin:end].all()))


def _padded(length: int) -> int:
    return max(SHORTEST, _power_of_two(length))


def _power_of_two(least: int) -> int:
    """The smallest one that is at least `least`."""
    return 2 ** (least - 1).bit_length()


@cache_programs
def compiled_scores(definition: ModelDef) -> Compiled:
    """A compiled (params, tokens [B, T], targets [B, T]) -> (log-probabilities float32, greedy
    bool), both [B, T].

    Entry t is that of `targets[:, t]` after `tokens[:, :t+1]`: the log-softmax of the float32
    logits, in nats, and whether it is the first of the largest logits. No rank holds more than its
    share of the vocabulary, and of that only CHUNK positions. Compiled once for each definition and
    shape, so other parameters cost no compilation.
    """
    axes = definition.layout.tensor

    def local(params, tokens, targets):
        x_BTD, _ = nn.hidden(definition, params, tokens, execution=SCANNED)

        def score(position: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x_D, target = position
            logits_V = nn.logits(definition, params, x_D[None, None])[0]
            loss = nn.cross_entropy(logits_V[None], target[None, None], axes=axes)
            logprob = -loss[0, 0]
            best, *_ = sampling.argmax_with(logits_V, [], axes=axes)
            return logprob, best[0] == target

        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        targets_N = targets.reshape(-1)
        found = lax.map(score, (x_ND, targets_N), batch_size=CHUNK)
        return jax.tree.map(lambda found_N: found_N.reshape(targets.shape), found)

    return steps.compiled(
        definition,
        local,
        in_dims=(definition.dims, "BT", "BT"),
        out_dims=("BT", "BT"),
        traits=definition.traits(SCANNED, phase=Phase.PREFILL),
    )
