"""Tasks of lm-evaluation-harness on questions in memory, and our model in it with a file of results.

`lm_eval.evaluate` is called rather than `simple_evaluate`, which also seeds Python's and numpy's generators, runs `git`
and, where PyTorch is installed, asks the system for its versions.
"""

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator, Sequence

import datasets
import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from ladder_jax.errors import UserError
from ladder_jax.evaluate import pairs
from ladder_jax.evaluate.answers import answer
from ladder_jax.evaluate.examples import Choice, Question
from ladder_jax.evaluate.harness import LadderJax
from ladder_jax.evaluate.model import SLOTS, Model
from ladder_jax.evaluate.rows import Row
from ladder_jax.evaluate.scorer import Span

MEAN = {"aggregation": "mean", "higher_is_better": True}
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "prompt",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": name, **MEAN} for name in ("acc", "acc_norm", "acc_bytes")],
}
# As lm_eval/tasks/gsm8k/gsm8k.yaml, version 3.0.
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
        {
            "name": "strict-match",
            "filter": [{"function": "regex", "regex_pattern": r"#### (\-?[0-9\.\,]+)"}, {"function": "take_first"}],
        },
        {
            "name": "flexible-extract",
            "filter": [
                {"function": "regex", "group_select": -1, "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)"},
                {"function": "take_first"},
            ],
        },
    ],
}


class LocalTask(ConfigurableTask):
    """A task whose questions are in memory: nothing is fetched, and nothing is written to a cache.

    config: CHOICES or GENERATION, and more. pool: questions for the `shots` before each.
    """

    def __init__(
        self,
        config: dict,
        examples: Sequence[Choice] | Sequence[Question],
        *,
        shots: int,
        pool: Sequence[Choice] | Sequence[Question],
    ):
        self._documents = list(map(_document, examples))
        # A question is left out of its own shots where both are of one split.
        few = {"split": "test", "process_docs": lambda _: list(map(_document, pool)), "sampler": "first_n"}
        more = {"fewshot_config": few} if shots else {}
        super().__init__(config={**config, "task": "questions", "test_split": "test", "num_fewshot": shots, **more})

    def download(self, *_, **__) -> None:
        self.dataset = {"test": datasets.Dataset.from_list(self._documents)}

    def build_all_requests(self, **how) -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar of its own
            super().build_all_requests(**how)

    def judged(self, index: int, responses: list) -> dict[str, tuple[list, dict]]:
        """For each filter: the filtered responses to question `index`, and their metrics."""
        document = self.eval_docs[index]
        instances = [Instance(self.OUTPUT_TYPE, document, (), i, resps=[one]) for i, one in enumerate(responses)]
        for taken in self._filters:
            taken.apply(instances)
        taken = {one.name: [instance.filtered_resps[one.name] for instance in instances] for one in self._filters}
        return {name: (found, self.process_results(document, found)) for name, found in taken.items()}


def _document(one: Choice | Question) -> dict:
    if isinstance(one, Question):
        return {"prompt": one.prompt, "answer": one.answer}
    return {"prompt": one.prompt, "choices": list(one.choices), "answer": one.gold}


def run(lm: LadderJax, task: LocalTask, names: dict[str, str]) -> dict[str, float | None]:
    """names: our name of each of the harness's results, such as "acc,none". Also their standard errors."""
    found = lm_eval.evaluate(lm, {task.task_name: task}, log_samples=False)["results"][task.task_name]
    errors = {f"{name}_stderr": found[metric.replace(",", "_stderr,")] for name, metric in names.items()}
    return {name: float(found[metric]) for name, metric in names.items()} | {
        name: None if error == "N/A" else float(error) for name, error in errors.items()
    }


class Recorded(LadderJax):
    """Answers a task's questions; each question is a row in the file of results.

    carry: `carry_out` with its file and progress. results: of all rows, once they are answered.
    truncated: how many prompts lost tokens on their left.
    """

    def __init__(self, model: Model, task: LocalTask, examples: Sequence, *, carry: Callable, slots: int = SLOTS):
        super().__init__(model)
        self._task, self._examples, self._carry, self._slots = task, examples, carry, slots
        self.truncated, self.results = 0, []

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        asked = itertools.groupby(requests, key=lambda request: request.doc_id)
        spans = [self._spans(self._examples[index], list(choices)) for index, choices in asked]
        decides = [
            (e.choices, e.gold, [(s.context, s.scored) for s in those]) for e, those in zip(self._examples, spans)
        ]
        rows = [Row.of(index, self.model.digest, *each) for index, each in enumerate(decides)]
        self.results = self._carry(rows, lambda left: self._scored(left, spans))
        return [score for result in self.results for score in zip(result["loglikelihoods"], result["greedy"])]

    def _spans(self, example: Choice, requests: list[Instance]) -> list[Span]:
        how = dict(tokenizer=self.model.tokenizer, prefix=self.model.prefix)
        try:
            whole = [pairs.pair(*request.args, **how) for request in requests]
            self.truncated += any(span.length > self.max_length for span in whole)
            return [pairs.cut(span, window=self.max_length) for span in whole]
        except UserError as error:
            raise UserError(f"line {example.line}: {error}") from None

    def _scored(self, left: list[Row], spans: list[list[Span]]) -> Iterator[tuple[Row, dict]]:
        asked = [(row, number) for row in left for number in range(len(spans[row.index]))]
        found: dict[int, dict[int, tuple[float, bool]]] = {}
        for place, score in self.model.scorer.scores([spans[row.index][number] for row, number in asked]):
            row, number = asked[place]
            those = found.setdefault(row.index, {})
            those[number] = score.loglikelihood, score.greedy
            if len(those) < len(spans[row.index]):
                continue
            example, scores = self._examples[row.index], [those[n] for n in range(len(those))]
            ((_, right),) = self._task.judged(row.index, scores).values()
            yield (
                row,
                {
                    "line": example.line,
                    "answer": example.gold,
                    "chosen": int(np.argmax([loglikelihood for loglikelihood, _ in scores])),
                    "right": bool(right["acc"]),
                    "right_chars": bool(right["acc_norm"]),
                    "right_bytes": bool(right["acc_bytes"]),
                    "loglikelihoods": [loglikelihood for loglikelihood, _ in scores],
                    "greedy": [greedy for _, greedy in scores],
                },
            )

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        asked = [self._request(*request.args, seed=index) for index, request in enumerate(requests)]
        new, stop, ends = asked[0].max_new_tokens, list(asked[0].stop), list(asked[0].stop_ids)
        self.truncated = sum(len(self.tok_encode(one.args[0])) > self.max_length - new for one in requests)
        settings = [self.model.digest, new, stop, ends]
        decides = [(list(one.prompt), example.answer) for one, example in zip(asked, self._examples)]
        rows = [Row.of(index, settings, *each) for index, each in enumerate(decides)]
        self.results = self._carry(rows, lambda left: self._written(left, asked))
        return [result["text"] for result in self.results]

    def _written(self, left: list[Row], asked: list) -> Iterator[tuple[Row, dict]]:
        for row, result in answer(self.model, left, request=lambda row: asked[row.index], slots=self._slots):
            judged = self._task.judged(row.index, [result.text])
            ((strict,), right), ((flexible,), right_flexible) = judged["strict-match"], judged["flexible-extract"]
            yield (
                row,
                {
                    "line": self._examples[row.index].line,
                    "text": result.text,
                    "finish_reason": str(result.finish),
                    "strict": strict,
                    "flexible": flexible,
                    "right": bool(right["exact_match"]),
                    "right_flexible": bool(right_flexible["exact_match"]),
                },
            )
