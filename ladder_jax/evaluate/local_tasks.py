"""What `tasks` needs of lm-evaluation-harness: its tasks on our questions, and our model with a file of results.

`lm_eval.evaluate` is called rather than `simple_evaluate`, which also seeds Python's and numpy's generators, runs `git`
and, where PyTorch is installed, asks the system for its versions.
"""

import contextlib
import io
import itertools
from collections.abc import Iterator, Sequence

import datasets
import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.filters import build_filter_ensemble

from ladder_jax.decode import Finish
from ladder_jax.errors import UserError
from ladder_jax.evaluate import pairs
from ladder_jax.evaluate.answers import answer
from ladder_jax.evaluate.examples import Choice, Question
from ladder_jax.evaluate.harness import LadderJax
from ladder_jax.evaluate.rows import Progress, Row, carry_out

MEAN = {"aggregation": "mean", "higher_is_better": True}
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "prompt",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": name, **MEAN} for name in ("acc", "acc_norm", "acc_bytes")],
}
# As lm_eval/tasks/gsm8k/gsm8k.yaml, version 3.0.
EXTRACTED = {
    "strict-match": {"regex_pattern": r"#### (\-?[0-9\.\,]+)"},
    "flexible-extract": {"group_select": -1, "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)"},
}
GENERATION = {
    "output_type": "generate_until",
    "doc_to_text": "prompt",
    "doc_to_target": "answer",
    "metric_list": [
        {
            "metric": "exact_match",
            **MEAN,
            "ignore_case": True,
            "ignore_punctuation": False,
            "regexes_to_ignore": [",", r"\$", "(?s).*#### ", r"\.$"],
        }
    ],
    "filter_list": [
        {"name": name, "filter": [{"function": "regex", **how}, {"function": "take_first"}]}
        for name, how in EXTRACTED.items()
    ],
}


class LocalTask(ConfigurableTask):
    """A task whose questions are in memory: nothing is fetched, and nothing is written to a cache."""

    def __init__(self, config: dict, documents: list[dict], *, shots: int, pool: list[dict]):
        self._documents = documents
        # A question is left out of its own shots where both are of one split.
        few = {"split": "test", "process_docs": lambda _: pool, "sampler": "first_n"} if shots else None
        more = {"task": "questions", "test_split": "test", "num_fewshot": shots, "fewshot_config": few}
        super().__init__(config={**config, **more})

    def download(self, *_, **__) -> None:
        self.dataset = {"test": datasets.Dataset.from_list(self._documents)}

    def build_all_requests(self, **how) -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # a bar of its own
            super().build_all_requests(**how)


def multiple_choice(examples: Sequence[Choice], *, shots: int, pool: Sequence[Choice]) -> LocalTask:
    document = lambda one: {"prompt": one.prompt, "choices": list(one.choices), "answer": one.gold}
    return LocalTask(CHOICES, list(map(document, examples)), shots=shots, pool=list(map(document, pool)))


def generation(
    examples: Sequence[Question], *, shots: int, pool: Sequence[Question], stop: Sequence[str], max_new_tokens: int
) -> LocalTask:
    document = lambda one: {"prompt": one.prompt, "answer": one.answer}
    settings = {"until": list(stop), "do_sample": False, "max_gen_toks": max_new_tokens}
    config = {**GENERATION, "generation_kwargs": settings}
    return LocalTask(config, list(map(document, examples)), shots=shots, pool=list(map(document, pool)))


def run(lm: LadderJax, task: LocalTask) -> dict:
    """The task's metrics, as `lm_eval.evaluate` names them."""
    found = lm_eval.evaluate(lm, {task.task_name: task}, log_samples=False)
    return found["results"][task.task_name]


class Choices(LadderJax):
    """Scores choices, a question with all of its own as a row of the file of results.

    truncated: how many prompts lost tokens on their left.
    """

    def __init__(
        self, model, examples: Sequence[Choice], task: LocalTask, *, file: str | None, progress: Progress | None
    ):
        super().__init__(model)
        self._examples, self._task, self._file, self._shown = examples, task, file, progress
        self.truncated = 0

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        spans = []
        for index, asked in itertools.groupby(requests, key=lambda request: request.doc_id):
            with _line(self._examples[index]):
                encoding = dict(tokenizer=self.model.tokenizer, prefix=self.model.prefix)
                whole = [pairs.pair(*request.args, **encoding) for request in asked]
                spans.append([pairs.cut(span, window=self.max_length) for span in whole])
            self.truncated += any(span.length > self.max_length for span in whole)
        decides = [
            (e.choices, e.gold, [(s.context, s.scored) for s in those]) for e, those in zip(self._examples, spans)
        ]
        rows = [Row.of(index, self.model.digest, *each) for index, each in enumerate(decides)]
        work = lambda left: self._answered(left, spans)
        results = carry_out(rows, work, file=self._file, progress=self._shown)
        return [score for result in results for score in zip(result["loglikelihoods"], result["greedy"])]

    def _answered(self, left: list[Row], spans: list[list]) -> Iterator[tuple[Row, dict]]:
        asked = [(row, number) for row in left for number in range(len(spans[row.index]))]
        found: dict[int, dict[int, tuple[float, bool]]] = {}
        for index, score in self.model.scorer.scores([spans[row.index][number] for row, number in asked]):
            row, number = asked[index]
            those = found.setdefault(row.index, {})
            those[number] = score.loglikelihood, score.greedy
            if len(those) == len(spans[row.index]):
                yield row, self._judged(row.index, [those[number] for number in range(len(those))])

    def _judged(self, index: int, scores: list[tuple[float, bool]]) -> dict:
        example, right = self._examples[index], self._task.process_results(self._task.eval_docs[index], scores)
        loglikelihoods, greedy = map(list, zip(*scores))
        return {
            "line": example.line,
            "answer": example.gold,
            "chosen": int(np.argmax(loglikelihoods)),
            "right": bool(right["acc"]),
            "right_chars": bool(right["acc_norm"]),
            "right_bytes": bool(right["acc_bytes"]),
            "loglikelihoods": loglikelihoods,
            "greedy": greedy,
        }


class Texts(LadderJax):
    """Writes answers, each a row of the file of results.

    truncated: how many prompts lost tokens on their left. unfinished: how many answers reached their longest.
    """

    def __init__(
        self,
        model,
        examples: Sequence[Question],
        task: LocalTask,
        *,
        slots: int,
        file: str | None,
        progress: Progress | None,
    ):
        super().__init__(model)
        self._examples, self._task, self._slots, self._file, self._shown = examples, task, slots, file, progress
        self._extracted = [
            build_filter_ensemble(name, [("regex", how), ("take_first", None)]) for name, how in EXTRACTED.items()
        ]
        self.truncated = self.unfinished = 0

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        asked = [self._request(*request.args, seed=index) for index, request in enumerate(requests)]
        room = self.max_length - asked[0].max_new_tokens
        self.truncated = sum(len(self.tok_encode(request.args[0])) > room for request in requests)
        ends = [asked[0].max_new_tokens, list(asked[0].stop), list(asked[0].stop_ids)]
        decides = [([self.model.digest, *ends], list(one.prompt), e.answer) for one, e in zip(asked, self._examples)]
        rows = [Row.of(index, *each) for index, each in enumerate(decides)]

        def work(left: list[Row]) -> Iterator[tuple[Row, dict]]:
            for row, result in answer(self.model, left, request=lambda row: asked[row.index], slots=self._slots):
                yield row, self._judged(requests[row.index], result)

        results = carry_out(rows, work, file=self._file, progress=self._shown)
        self.unfinished = sum(result["finish_reason"] == Finish.LENGTH for result in results)
        return [result["text"] for result in results]

    def _judged(self, request: Instance, result) -> dict:
        one = Instance(request.request_type, request.doc, request.arguments, request.idx, resps=[result.text])
        for extracted in self._extracted:
            extracted.apply([one])
        right = {
            name: bool(self._task.process_results(one.doc, [found])["exact_match"])
            for name, found in one.filtered_resps.items()
        }
        return {
            "line": self._examples[request.doc_id].line,
            "text": result.text,
            "finish_reason": str(result.finish),
            "strict": one.filtered_resps["strict-match"],
            "flexible": one.filtered_resps["flexible-extract"],
            "right": right["strict-match"],
            "right_flexible": right["flexible-extract"],
        }


@contextlib.contextmanager
def _line(example: Choice | Question) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"line {example.line}: {error}") from None
