"""Text from a model: prefill, then the token loop, a chunk of tokens at a time."""

from collections.abc import Generator as GeneratorOf, Sequence

import jax
import numpy as np

from ladder_jax.config import DecodeConfig, Loop, Quantize, RunConfig
from ladder_jax.config.fields import check_type, member
from ladder_jax.decode import steps, weights
from ladder_jax.decode.request import (
    Decoder,
    NoNumbers,
    Piece,
    Request,
    Result,
    TokenSequence,
    check_decoder,
    check_prompts,
    whole_numbers,
)
from ladder_jax.decode.sampling import NO_NUMBER, Choice, Settings
from ladder_jax.decode.steps import CHUNK
from ladder_jax.errors import RunFailed, UserError, described
from ladder_jax.nn import ModelDef, Params, Transformer
from ladder_jax.nn.model_def import check_model
from ladder_jax.parallel import cache_programs

DEFAULT = DecodeConfig()


class Generator:
    """Generates with fixed parameters: `Generator(model).tokens([[1, 2]], config=...)`."""

    def __init__(
        self,
        model: Transformer | ModelDef,
        params: Params | weights.Reader | None = None,
        *,
        loop: Loop = Loop.UNROLLED,
        quantize: Quantize = Quantize.NONE,
    ):
        """A ModelDef needs `params`: as they are trained and stored, stacked, in memory or read one
        by one.
        """
        self.definition, params = parts_of(model, params)
        self.loop = member(Loop, "loop", loop)
        self.quantize = member(Quantize, "quantize", quantize)
        self.params = weights.prepare(
            self.definition, params, loop=self.loop, quantize=self.quantize
        )

    def pieces(
        self, request: Request, *, decoder: Decoder | None = None, config: DecodeConfig = DEFAULT
    ) -> GeneratorOf[Piece, None, Result]:
        """Yields the request's text as it grows, and returns its Result: what `Engine` gives the
        same request.

        decoder: the bytes of tokens; without it there is no text, and no stop strings.
        config: for `launch`, `prefill_chunk` and `interleave`.
        Raises UserError for a prompt outside the vocabulary, NoNumbers where the logits are NaN or
        infinite.
        """
        check_type("request", request, Request)
        check_type("config", config, DecodeConfig)
        check_decoder(decoder)
        request.check(vocab_size=self.definition.config.vocab_size, decoder=decoder)
        sequence = TokenSequence(request, decoder=decoder)
        rows = self.definition.layout.batch_ranks  # of which the first counts
        choice = Choice.GREEDY if request.is_greedy else Choice.SAMPLED
        prompts = [request.prompt] * rows
        first = lambda x: None if x is None else np.asarray(x).reshape(rows, -1)[0]
        for tokens, logprobs in self._chunks(prompts, request, choice=choice, config=config):
            piece, outcome = sequence.take(first(tokens), first(logprobs))
            if piece:
                yield piece
            if isinstance(outcome, NoNumbers):
                raise outcome
            if outcome:  # at max_new_tokens at the latest
                return outcome

    def tokens(self, prompts: Sequence[Sequence[int]], *, config: DecodeConfig) -> np.ndarray:
        """New tokens [prompts, max_new_tokens]; the same seed gives the same tokens.

        Raises UserError for a prompt outside the vocabulary, RunFailed where a prompt's logits are
        no numbers.
        """
        check_type("config", config, DecodeConfig)
        check_type("prompts", prompts, Sequence, np.ndarray, jax.Array)
        prompts = [whole_numbers("a prompt", prompt) for prompt in prompts]
        check_prompts(prompts, vocab_size=self.definition.config.vocab_size)
        padding = -len(prompts) % self.definition.layout.batch_ranks
        rows = [*prompts, *[prompts[0]] * padding]
        choice = Choice.SAMPLED if config.temperature else Choice.GREEDY
        chunks = self._chunks(rows, config, choice=choice, config=config)
        made = np.concatenate(
            [np.asarray(tokens).reshape(len(rows), -1) for tokens, _ in chunks], axis=1
        )
        new = made[: len(prompts), : config.max_new_tokens]
        failed = (new == NO_NUMBER).any(axis=1)
        if failed.any():
            which = f"prompt {np.argmax(failed) + 1} of {len(prompts)}"
            raise RunFailed(f"{which}: the model's logits are no numbers (NaN or infinite)")
        return new

    def _chunks(self, prompts, asked, *, choice, config):
        """The first token of each prompt, then CHUNK tokens at a time until there are at least
        `asked.max_new_tokens`. asked: a Request or a DecodeConfig, sampled as it says.

        The first token does not wait until the decode program is compiled. Each later chunk is sent
        to the devices before the one before it is yielded: they need not wait for the host.
        """
        definition = self.definition
        form = dict(loop=self.loop, launch=config.launch, quantize=self.quantize)
        new = asked.max_new_tokens
        settings = Settings.like(asked, rows=len(prompts))
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        longest = int(lengths.max())
        positions = steps.positions_for(longest + new, chunk=CHUNK)
        width = steps.padded_length(longest, positions=positions)
        padded = np.zeros((len(prompts), width), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        ends, settings = jax.device_put((lengths, settings), definition.layout.sharding("B"))

        logits, caches = steps.prefill_in_chunks(
            definition,
            self.params,
            padded,
            lengths,
            capacity=positions,
            chunk=config.prefill_chunk,
            interleave=config.interleave.parts,
            **form,
        )
        seen = steps.seen_in(definition)(padded, lengths)
        token, logprob = steps.sample_first(definition, choice=choice)(logits, settings, ends, seen)
        yield token, logprob
        decode = steps.decode_many(definition, choice=choice, **form)
        chunk = None
        for _ in range(1, new, CHUNK):
            if chunk:
                token, ends = _advance(definition)(chunk[0], ends)
            tokens, logprobs, caches, seen = decode(
                self.params, caches, seen, token, ends, settings
            )
            if chunk:
                yield chunk
            chunk = tokens, logprobs
        if chunk:
            yield chunk

    def __repr__(self) -> str:
        return f"Generator(loop={self.loop.value!r}, quantize={self.quantize.value!r}, of {self.definition!r})"


def parts_of(
    model: Transformer | ModelDef, params: Params | weights.Reader | None
) -> tuple[ModelDef, Params | weights.Reader]:
    """The definition and parameters of a Transformer, or of a ModelDef with `params`. Raises
    UserError for less.
    """
    if isinstance(model, Transformer):
        return model.definition, model.params if params is None else params
    if not isinstance(model, ModelDef) or params is None:
        raise UserError(
            f"inference needs a Transformer, or a ModelDef and its params, not {described(model)}"
        )
    check_model(model, params)
    return model, params


@cache_programs
def _advance(definition):
    """A compiled (new tokens [B, n], lengths [B]) -> (last tokens [B], lengths [B]), laid out for
    `decode_many`.
    """
    local = lambda new, lengths: (new[:, -1], lengths + new.shape[1])
    return steps.compiled(definition, local, in_dims=("BT", "B"), out_dims=("B", "B"))


def default_tensor(config: RunConfig) -> int:
    """As many tensor-parallel devices as the model was trained on, if this machine has as many;
    else one.
    """
    return config.mesh.tensor if config.mesh.tensor <= len(jax.devices()) else 1
