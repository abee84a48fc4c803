"""Text from a model: byte-level prompts of different lengths in one batch, streamed in chunks."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ladder_jax.config import DecodeConfig, Loop, Quantize, RunConfig
from ladder_jax.decode import sampling, steps, weights
from ladder_jax.decode.chunks import prefill_in_chunks
from ladder_jax.decode.sampling import NO_NUMBER, Choice
from ladder_jax.decode.steps import CHUNK
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.nn import ModelDef, Params

BUCKET = 32  # short prompt and cache lengths are rounded up to a multiple, so that few shapes are compiled


@dataclasses.dataclass(frozen=True)
class Generator:
    """Generates with fixed parameters: `Generator.of(definition, params).tokens([[1, 2]], config=...)`."""

    definition: ModelDef
    params: Params
    loop: Loop
    quantize: Quantize = Quantize.NONE

    @classmethod
    def of(
        cls,
        definition: ModelDef,
        params: Params | weights.Reader,
        *,
        loop: Loop = Loop.UNROLLED,
        quantize: Quantize = Quantize.NONE,
    ) -> "Generator":
        """`params` as trained and stored, float32 and stacked, or what reads them one by one."""
        return cls(definition, weights.prepare(definition, params, loop=loop, quantize=quantize), loop, quantize)

    def tokens(self, prompts: Sequence[Sequence[int]], *, config: DecodeConfig) -> np.ndarray:
        """New tokens [prompts, max_new_tokens]; the same seed gives the same tokens.

        Raises RunFailed where a prompt's logits are no numbers.
        """
        return np.concatenate(list(self.stream(prompts, config=config)), axis=1)

    def stream(self, prompts: Sequence[Sequence[int]], *, config: DecodeConfig) -> Iterator[np.ndarray]:
        """New tokens as they come, in chunks [prompts, up to CHUNK]."""
        check_prompts(prompts, vocab_size=self.definition.config.vocab_size)
        batch_ranks = self.definition.layout.batch_ranks
        rows = list(prompts) + [prompts[0]] * (-len(prompts) % batch_ranks)
        lengths = np.array([len(row) for row in rows], np.int32)
        padded = np.zeros((len(rows), _round_up(lengths.max())), np.int32)
        for row, prompt in zip(padded, rows, strict=True):
            row[: len(prompt)] = prompt
        capacity = _round_up(lengths.max() + config.max_new_tokens + CHUNK)

        form = dict(loop=self.loop, quantize=self.quantize)
        choice = Choice.SAMPLED if config.temperature else Choice.GREEDY
        decode = steps.decode_many(self.definition, choice=choice, launch=config.launch, **form)
        place = self.definition.layout.sharding("B")
        settings = jax.device_put(_settings(config, rows=len(rows)), place)

        sizes = dict(capacity=capacity, chunk=config.prefill_chunk)
        logits, caches = prefill_in_chunks(self.definition, self.params, padded, lengths, **sizes, **form)
        seen = steps.seen_in(self.definition)(padded, lengths)
        token, _ = steps.sample_first(self.definition)(logits, settings, lengths, seen)
        yield _numbers(token[:, None], take=1, prompts=len(prompts))
        made = 1
        while made < config.max_new_tokens:
            at = jax.device_put(lengths, place)
            new, _, caches, seen = decode(self.params, caches, seen, token, at, settings)
            token, lengths = jax.device_put(new[:, -1], place), lengths + CHUNK
            take = min(CHUNK, config.max_new_tokens - made)
            yield _numbers(new, take=take, prompts=len(prompts))
            made += take


def _numbers(new: jax.Array, *, take: int, prompts: int) -> np.ndarray:
    found = np.asarray(new)[:prompts, :take]
    if (found == NO_NUMBER).any():
        row = np.argmax((found == NO_NUMBER).any(axis=1))
        raise RunFailed(f"prompt {row + 1} of {prompts}: the model's logits are no numbers (NaN or infinite)")
    return found


def _settings(config: DecodeConfig, *, rows: int) -> sampling.Settings:
    """`config` for every row, each with a key of its own."""
    return sampling.Settings.of(
        jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(config.seed), jnp.arange(rows)),
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
    )


def default_tensor(config: RunConfig) -> int:
    """As many tensor-parallel devices as the model was trained on, if this machine has them; else one."""
    return config.mesh.tensor if config.mesh.tensor <= len(jax.devices()) else 1


def check_prompts(prompts: Sequence[Sequence[int]], *, vocab_size: int) -> None:
    if not prompts:
        raise UserError("there is no prompt")
    for prompt in prompts:
        if not len(prompt):
            raise UserError("the prompt is empty; generation needs at least one token to start from")
        worst = min(prompt) if min(prompt) < 0 else max(prompt)
        if not 0 <= worst < vocab_size:
            raise UserError(f"the prompt holds the token {worst}, outside the model's vocabulary of {vocab_size}")


def _round_up(length: int) -> int:
    """To a multiple of BUCKET, of more from 16 BUCKETs on: at most 8 shapes from one power of two to the next."""
    unit = max(BUCKET, 2 ** (int(length) - 1).bit_length() // 16)
    return -(-int(length) // unit) * unit
