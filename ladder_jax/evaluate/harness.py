"""Our models in EleutherAI's lm-evaluation-harness: its model `ladder_jax` (pip install 'ladder-jax[lm-eval]').

    python -m ladder_jax.evaluate.harness --model ladder_jax --model_args checkpoint=runs/book,tensor=4 --tasks arc_easy

is its own command line, `lm_eval`, which knows the model once this module is imported. Requests are made, tokenized and
judged by the harness; only log-likelihoods and texts come from here.
"""

from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from ladder_jax.decode import Request
from ladder_jax.errors import UserError
from ladder_jax.evaluate import pairs
from ladder_jax.evaluate.answers import MAX_NEW_TOKENS, answer, stop_ids
from ladder_jax.evaluate.model import SLOTS, Model, open_model
from ladder_jax.evaluate.scorer import BATCH_TOKENS, Span
from ladder_jax.progress import progress

SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the harness's words for one thing
WITHOUT_EFFECT = {"num_beams": 1, "use_cache": True}


@register_model("ladder_jax")
class LadderJax(TemplateLM):
    """checkpoint: a path, or a Model. The other arguments are `open_model`'s, under the harness's names.

    batch_size, max_batch_size, device: given by the harness; batches are made by `batch_tokens`, on the mesh's devices.
    """

    def __init__(
        self,
        checkpoint: str | Model,
        *,
        tensor: int | None = None,
        data: int = 1,
        max_length: int | None = None,
        max_gen_toks: int = MAX_NEW_TOKENS,
        prefix_token_id: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        super().__init__()
        if not isinstance(checkpoint, Model):
            how = dict(tensor=tensor, data=data, window=max_length, prefix=prefix_token_id, batch_tokens=batch_tokens)
            checkpoint = open_model(checkpoint, **how)
        self.model, self.max_gen_toks = checkpoint, max_gen_toks

    @property
    def max_length(self) -> int:
        return self.model.window

    @property
    def eot_token_id(self) -> int:
        return (*self.model.tokenizer.stop_ids, self.model.prefix)[0]

    @property
    def prefix_token_id(self) -> int:
        return self.model.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        if add_special_tokens is None:
            return pairs.encode(string, tokenizer=self.model.tokenizer)
        tokenizer = self.model.tokenizer
        return tokenizer.encode(string) if add_special_tokens else tokenizer.encode_bare(string)

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise UserError("the model ladder_jax always asks for the next answer: gen_prefix cannot be used with chat")
        return self.model.tokenizer.render(chat_history, prompt=True)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        spans, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            how = dict(prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
            for window in utils.get_rolling_token_windows(self.tok_encode(text), **how):
                spans.append(Span(*utils.make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (loglikelihood, _) in zip(owners, self._scores(spans, quiet=disable_tqdm)):
            totals[owner] += loglikelihood
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        asked = [self._request(*request.args, seed=index) for index, request in enumerate(requests)]
        texts: list[str] = [""] * len(asked)
        with self._progress(len(asked), quiet=disable_tqdm) as update:
            answers = answer(self.model, range(len(asked)), request=asked.__getitem__, slots=SLOTS)
            for done, (index, result) in enumerate(answers):
                texts[index] = result.text
                self.cache_hook.add_partial("generate_until", requests[index].args, result.text)
                update(done + 1, "")
        return texts

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **_) -> list[tuple[float, bool]]:
        spans = [pairs.cut(Span(context, scored), window=self.max_length) for _, context, scored in requests]
        scores = self._scores(spans, quiet=disable_tqdm)
        for (texts, *_), score in zip(requests, scores):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def _scores(self, spans: list[Span], *, quiet: bool) -> list[tuple[float, bool]]:
        found = {}
        with self._progress(len(spans), quiet=quiet) as update:
            for index, score in self.model.scorer.scores(spans):
                found[index] = score.loglikelihood, score.greedy
                update(len(found), "")
        return [found[index] for index in range(len(spans))]

    def _progress(self, total: int, *, quiet: bool):
        return progress(total, label="{done}/{total} requests", say=(lambda line: None) if quiet else None)

    def _request(self, context: str, settings: dict[str, Any], *, seed: int) -> Request:
        """As the harness's model `hf` reads its settings. Raises UserError for what would be ignored."""
        settings = dict(settings)
        until = settings.pop("until", None) or []
        stop = [one for one in ([until] if isinstance(until, str) else until) if one]
        given = [settings.pop(name) for name in LENGTHS if settings.get(name) is not None]
        new = int(given[0]) if given else self.max_gen_toks
        sampled = {name: settings.pop(name) for name in SAMPLED if settings.get(name) is not None}
        if not settings.pop("do_sample", sampled.get("temperature", 0.0) > 0):
            sampled = {name: value for name, value in sampled.items() if name == "repetition_penalty"}
        elif "temperature" not in sampled:
            sampled["temperature"] = 1.0
        for name, value in settings.items():
            if value is not None and WITHOUT_EFFECT.get(name) != value:
                raise UserError(f"the model ladder_jax cannot honour the task's {name}={value!r} in generation_kwargs")
        if not 0 < new < self.max_length:
            raise UserError(f"{new} new tokens leave no room for a prompt in max_length={self.max_length}")
        tokens = self.tok_encode(context)[-(self.max_length - new) :] or [self.prefix_token_id]
        ends = stop_ids(stop, tokenizer=self.model.tokenizer)
        return Request(tokens, max_new_tokens=new, stop=stop, stop_ids=ends, seed=seed, **sampled)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
