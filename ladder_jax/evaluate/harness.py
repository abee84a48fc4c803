"""Our models in EleutherAI's lm-evaluation-harness: its model `ladder_jax` (pip install
'ladder-jax[lm-eval]').

    python -m ladder_jax.evaluate.harness --model ladder_jax --model_args
    checkpoint=runs/book,tensor=4 --tasks arc_easy

is its own command line, `lm_eval`, which knows the model once this module is imported. Requests are
made, tokenized and judged by the harness; only log-likelihoods and texts come from here.
`LocalTask` asks it about questions in memory.
"""

import contextlib
import inspect
import io
import itertools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import datasets
import lm_eval
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.utils import normalize_gen_kwargs

from ladder_jax.config.fields import not_none
from ladder_jax.decode import Request
from ladder_jax.decode.request import CHOOSING, ends
from ladder_jax.errors import RunFailed, UserError, one_line, unknown
from ladder_jax.evaluate.model import MAX_NEW_TOKENS, Model, open_model
from ladder_jax.evaluate.perplexity import windows
from ladder_jax.evaluate.scorer import Span
from ladder_jax.terminal import progress, say

WITHOUT_EFFECT = {"num_beams": 1, "use_cache": True}


@register_model("ladder_jax")
class LadderJax(TemplateLM):
    """checkpoint: a path, or a Model. max_length, prefix_token_id: the harness's names for
    `open_model`'s window and prefix; the other arguments have `open_model`'s names.

    batch_size, max_batch_size, device: given by the harness; batches are made by `batch_tokens`, on
        the mesh's devices.
    """

    def __init__(
        self,
        checkpoint: str | Model = "",
        *,
        max_length: int | None = None,
        max_gen_toks: int = MAX_NEW_TOKENS,
        prefix_token_id: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **how: Any,
    ):
        super().__init__()
        theirs = inspect.signature(open_model).parameters.keys() - {"name", "window", "prefix"}
        for name in how.keys() - theirs:
            ours = ("checkpoint", "max_length", "max_gen_toks", "prefix_token_id")
            raise unknown("argument", name, (*ours, *sorted(theirs)))
        if not isinstance(checkpoint, Model):
            checkpoint = open_model(checkpoint, window=max_length, prefix=prefix_token_id, **how)
        self.model = checkpoint
        self.max_gen_toks = max_gen_toks

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
            return self.model.encode(string)
        tokenizer = self.model.tokenizer
        return tokenizer.encode(string, special=add_special_tokens)

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer.name

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if not add_generation_prompt:
            raise UserError(
                "the model ladder_jax always asks for the next answer: gen_prefix cannot be used with chat"
            )
        return self.model.tokenizer.render(chat_history, prompt=True)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        how = dict(prefix=self.prefix_token_id, window=self.max_length, stride=self.max_length)
        cut = []
        for request in requests:
            tokens = self.tok_encode(*request.args)
            cut.append(list(windows(tokens, **how)))
        every = list(itertools.chain(*cut))
        scores = iter(self._scores(every, quiet=disable_tqdm))
        return [sum(next(scores)[0] for _ in spans) for spans in cut]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        asked = {
            index: self.request(*request.args, seed=index) for index, request in enumerate(requests)
        }

        def texts() -> Iterator[tuple[int, str]]:
            """Each is in the harness's cache (`use_cache`) at once: a killed run goes on."""
            for index, result in self.model.answers(asked):
                self.cache_hook.add_partial("generate_until", requests[index].args, result.text)
                yield index, result.text

        return self._all(texts(), len(asked), quiet=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, **_
    ) -> list[tuple[float, bool]]:
        spans = [self.model.cut(Span(context, scored)) for _, context, scored in requests]
        return self._scores(spans, quiet=disable_tqdm)

    def _scores(self, spans: list[Span], *, quiet: bool) -> list[tuple[float, bool]]:
        found = self._all(self.model.scorer.scores(spans), len(spans), quiet=quiet)
        return [(score.loglikelihood, score.greedy) for score in found]

    def _all[T](self, results: Iterator[tuple[int, T]], total: int, *, quiet: bool) -> list[T]:
        """In the order of their indices. Shows how many have come."""
        found = {}
        tell = (lambda line: None) if quiet else say
        with progress(total, label="{done}/{total} requests", say=tell) as update:
            for index, result in results:
                found[index] = result
                update(len(found), "")
        return [found[index] for index in range(total)]

    def request(self, context: str, settings: dict[str, Any], *, seed: int) -> Request:
        """As the harness's model `hf` reads its settings. Raises UserError for what would be
        ignored.
        """
        settings = not_none(settings)
        if settings.get("do_sample"):
            settings.setdefault("temperature", 1.0)
        settings = normalize_gen_kwargs(settings, self.max_gen_toks)
        new = settings.pop("max_gen_toks")
        stop = [one for one in settings.pop("until") if one]
        sampled = {name: settings.pop(name) for name in CHOOSING if name in settings}
        if not settings.pop("do_sample"):
            sampled = {
                name: value for name, value in sampled.items() if name == "repetition_penalty"
            }
        for name, value in settings.items():
            if WITHOUT_EFFECT.get(name) != value:
                raise UserError(
                    f"the model ladder_jax cannot honour the task's {name}={value!r} in generation_kwargs"
                )
        if not 0 < new < self.max_length:
            raise UserError(
                f"{new} new tokens leave no room for a prompt in the window of {self.max_length} (allowed: 1 to"
                f" {self.max_length - 1}; --max-new-tokens, in the harness max_gen_toks)"
            )
        room = self.max_length - new
        tokens = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        stops = ends(stop, tokenizer=self.model.tokenizer)
        return Request(tokens, max_new_tokens=new, seed=seed, **stops, **sampled)


class Pairs(LadderJax):
    """Gives the tokens of each context and continuation, in place of their scores."""

    def _loglikelihood_tokens(self, requests, **_) -> list[Span]:
        return [Span(context, scored) for _, context, scored in requests]


MEAN = {"aggregation": "mean", "higher_is_better": True}
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "prompt",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": [{"metric": name, **MEAN} for name in ("acc", "acc_norm")],
}


def gsm8k() -> dict:
    """A task that takes and judges answers as the harness's gsm8k does."""
    file = pathlib.Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml"
    theirs = yaml.safe_load(file.read_text(encoding="utf-8"))
    judging = {name: theirs[name] for name in ("output_type", "metric_list", "filter_list")}
    return {**judging, "doc_to_text": "prompt", "doc_to_target": "answer"}


class LocalTask(ConfigurableTask):
    """A task whose questions are in memory: nothing is fetched, and nothing is written to a cache.

    config: CHOICES or of `gsm8k`, and more. documents: the questions, by the names in it. pool:
        those for the `shots` before each.
    """

    def __init__(
        self,
        config: dict,
        documents: list[dict],
        *,
        shots: int,
        pool: list[dict],
    ):
        self._documents = documents
        # A question is left out of its own shots where both are of one split.
        few = {
            "split": "test",
            "process_docs": lambda _: datasets.Dataset.from_list(pool),
            "sampler": "first_n",
        }
        more = {"fewshot_config": few} if shots else {}
        super().__init__(
            config={
                **config,
                "task": "questions",
                "test_split": "test",
                "num_fewshot": shots,
                **more,
            }
        )

    def download(self, *_, **__) -> None:
        self.dataset = {"test": datasets.Dataset.from_list(self._documents)}

    def asked(self) -> list[list[Instance]]:
        """Each question's requests."""
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar of its own
            self.build_all_requests()
        by_question = itertools.groupby(self.instances, key=lambda instance: instance.doc_id)
        return [list(those) for _, those in by_question]

    def judged(self, index: int, responses: list) -> dict[str, tuple[list, dict]]:
        """For each filter: the filtered responses to question `index`, and their metrics."""
        document = self.eval_docs[index]
        instances = [
            Instance(self.OUTPUT_TYPE, document, (), i, resps=[one])
            for i, one in enumerate(responses)
        ]
        found = {}
        for taken in self._filters:
            taken.apply(instances)
            filtered = [instance.filtered_resps[taken.name] for instance in instances]
            found[taken.name] = filtered, self.process_results(document, filtered)
        return found


def main() -> int:
    """The harness's command line. What our model refuses is one line, as of `ladder-jax`."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except (UserError, RunFailed) as error:
        say(f"ladder-jax: {one_line(str(error))}")
        return getattr(error, "status", 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
