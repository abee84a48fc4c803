"""The same model through lm-evaluation-harness and through our own evaluation: the numbers are
equal.
"""

import dataclasses
import functools
import json
import pathlib

import lm_eval
import pytest
import yaml

from ladder_jax import evaluate
from tests.evaluate.conftest import WINDOW, rows_of
from tests.refusals import refused

TEXTS = [
    "the cat sat on the mat, and the rat sat on the cat.\nnaïve café, 東京 🙂\n" * 4,
    "the rat",
    " a  cat\n",
]
CHOICES = [
    {"context": "the cat sat on", "choices": ["the mat", "東京", "a"], "answer": 1},
    {"context": "the rat  ", "choices": ["sat on the mat, and the cat", "🙂 ü"], "answer": 0},
    {"context": TEXTS[0], "choices": ["mat", "the cat"], "answer": 1},
    {"context": "", "choices": ["rat", "the café"], "answer": 0},
    {"context": "naïve", "choices": ["café", "cat", "and", "three"], "answer": 3},
]
QUESTIONS = [
    {"question": f"{n} cats and {n} rats sat on the mat", "answer": f"So\n#### {2 * n}"}
    for n in range(4)
]
THEIRS = yaml.safe_load(
    (pathlib.Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text(encoding="utf-8")
)
GSM8K = {
    **{name: THEIRS[name] for name in ("output_type", "metric_list", "filter_list")},
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {**THEIRS["generation_kwargs"], "max_gen_toks": 12},
}
METRICS = {
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": m} for m in ("word_perplexity", "byte_perplexity", "bits_per_byte")
        ],
    },
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": m} for m in ("acc", "acc_norm")],
    },
    "questions": GSM8K,
}
ROWS = {"rolling": [{"text": text} for text in TEXTS], "choices": CHOICES, "questions": QUESTIONS}


def asked(folder, name):
    """A file of ROWS."""
    (folder / name).write_text("\n".join(map(json.dumps, ROWS[name])))
    return str(folder / name)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of local tasks for the harness."""
    folder = tmp_path_factory.mktemp("tasks")
    # Read as `datasets` is imported: nothing is fetched, and nothing is written to the user's
    # cache.
    monkeypatch = pytest.MonkeyPatch()
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}.items():
        monkeypatch.setenv(name, value)
    for name in ROWS:
        kept = {"data_files": {"test": asked(folder, name)}, "cache_dir": str(folder / "cache")}
        local = {"dataset_path": "json", "dataset_kwargs": kept, "test_split": "test"}
        shots = {"fewshot_split": "test", "fewshot_config": {"sampler": "first_n"}}
        task = {"task": f"local_{name}", **local, **shots, **METRICS[name]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    yield folder
    monkeypatch.undo()


@pytest.fixture(scope="module")
def harness(tasks):
    """`harness(lm, task)`: the results of a local task, by the harness's own `simple_evaluate`."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)

    def run(lm, name, *, shots=0):
        done = simple_evaluate(
            lm,
            tasks=[f"local_{name}"],
            num_fewshot=shots,
            bootstrap_iters=100,
            task_manager=manager,
            log_samples=True,
        )
        return done["results"][f"local_{name}"], done["samples"][f"local_{name}"]

    return run


@pytest.fixture(scope="module", params=["pieces", "bytes"])
def ours(request, model, bytes_model):
    return model if request.param == "pieces" else bytes_model


@pytest.fixture
def adapter(ours):
    from ladder_jax.evaluate.harness import LadderJax

    return LadderJax(ours, max_gen_toks=12)


@pytest.fixture
def independent(ours, exact):
    """A model of the harness that shares nothing with ours but the tokenizer: scored one by one, in
    float64.
    """
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

    class Exact(TemplateLM):
        eot_token_id = prefix_token_id = ours.prefix

        def tok_encode(self, string, add_special_tokens=None, **_):
            bare = add_special_tokens is False
            return ours.tokenizer.encode(string, special=not bare)

        def _loglikelihood_tokens(self, requests, **_):
            def score(context, scored):
                room = WINDOW + 1 - len(scored)
                return exact.scores(context[-room:], scored)

            return [score(context, scored) for _, context, scored in requests]

        def loglikelihood_rolling(self, requests, **_):
            how = dict(prefix_token=ours.prefix, max_seq_len=WINDOW, context_len=1)
            cut = lambda text: utils.get_rolling_token_windows(self.tok_encode(text), **how)
            pairs = lambda text: [("", *utils.make_disjoint_window(pair)) for pair in cut(text)]
            return [
                sum(s for s, _ in self._loglikelihood_tokens(pairs(r.args[0]))) for r in requests
            ]

        def generate_until(self, requests, **_):
            raise NotImplementedError

    return Exact()


def check_perplexity(ours, lm, harness, *, close):
    found = evaluate.text_perplexity(ours, TEXTS)
    theirs = harness(lm, "rolling")[0]
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        # an error of the loss times 30 nats or more a word
        loose = 100 * close if name == "word_perplexity" else close
        assert getattr(found, name) == pytest.approx(theirs[f"{name},none"], rel=loose)


def check_choices(ours, lm, harness, folder, *, shots, close):
    out = folder / "out.jsonl"
    questions = evaluate.read_choices(asked(folder, "choices"))
    # a question is not its own shot, on whatever line of their file, its choices in any order
    elsewhere = [
        dataclasses.replace(
            one, line=99, choices=one.choices[::-1], gold=len(one.choices) - 1 - one.gold
        )
        for one in questions
    ]
    found = evaluate.multiple_choice(
        ours, questions, shots=shots, shots_from=elsewhere, file=str(out)
    )
    lines = {line["index"]: line for line in rows_of(out)}
    theirs, samples = harness(lm, "choices", shots=shots)
    assert len(samples) == len(lines) == found.examples == len(CHOICES)
    assert found.truncated >= 1
    for name, metric in (("accuracy", "acc"), ("accuracy_normalised", "acc_norm")):
        for end in ("", "_stderr"):
            expected = theirs[f"{metric}{end},none"]
            assert getattr(found, f"{name}{end}") == pytest.approx(expected, rel=1e-6)
    for sample in samples:
        line = lines[sample["doc_id"]]
        scores, greedy = zip(*(response for (response,) in sample["resps"]))
        assert line["loglikelihoods"] == pytest.approx(list(map(float, scores)), rel=close)
        assert line["greedy"] == list(map(bool, greedy))


def check_answers(ours, lm, harness, folder, *, shots):
    out = folder / "texts.jsonl"
    questions = evaluate.read_questions(asked(folder, "questions"))
    how = dict(max_new_tokens=12, shots=shots, shots_from=questions, file=str(out))
    found = evaluate.generation(ours, questions, **how)
    theirs, samples = harness(lm, "questions", shots=shots)
    for name, kept in (("accuracy", "strict-match"), ("accuracy_normalised", "flexible-extract")):
        assert getattr(found, name) == theirs[f"exact_match,{kept}"]
        assert getattr(found, f"{name}_stderr") == theirs[f"exact_match_stderr,{kept}"]
    lines = {line["index"]: line for line in rows_of(out)}
    for sample in samples:
        assert lines[sample["doc_id"]]["text"] == sample["resps"][0][0]
    assert any(line["text"].strip() for line in lines.values())


def test_perplexity(ours, adapter, independent, harness):
    check_perplexity(ours, adapter, harness, close=1e-6)
    check_perplexity(ours, independent, harness, close=1e-5)


@pytest.mark.parametrize("shots", [0, 2])
def test_multiple_choice(ours, adapter, independent, harness, shots, tmp_path):
    check_choices(ours, adapter, harness, tmp_path, shots=shots, close=1e-6)
    check_choices(ours, independent, harness, tmp_path, shots=shots, close=1e-5)


@pytest.mark.parametrize("shots", [0, 1])
def test_generation(ours, adapter, harness, shots, tmp_path):
    check_answers(ours, adapter, harness, tmp_path, shots=shots)


def test_what_is_not_asked(ours, run):
    for score in (evaluate.multiple_choice, evaluate.generation):
        with refused("there is no question"):
            score(ours, [])
        with refused("shots must be at least 0, not -1"):
            score(ours, [], shots=-1)
        with refused("model must be of type Model, not 'runs/book'"):
            score("runs/book", [])
    with refused("mesh.tensor must be positive, not 0"):
        evaluate.open_model(run, tensor=0)


def test_an_interrupted_generation_goes_on_from_the_cache(adapter, monkeypatch, tmp_path):
    from lm_eval.api import instance, model

    settings = {"until": ["\n"], "do_sample": False}
    ask = lambda text: instance.Instance("generate_until", {}, (text, settings), 0)
    requests = [ask(text) for text in ("the cat", "a dog", "the end")]
    expected = adapter.generate_until(requests, disable_tqdm=True)
    answers, asked = evaluate.Model.answers, []

    def interrupted(self, wanted):
        yield next(answers(self, wanted))
        raise KeyboardInterrupt

    def counted(self, wanted):
        asked.append(len(wanted))
        return answers(self, wanted)

    cached = model.CachingLM(adapter, str(tmp_path / "cache.db"))
    monkeypatch.setattr(evaluate.Model, "answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached.generate_until(requests)
    monkeypatch.setattr(evaluate.Model, "answers", counted)
    assert cached.generate_until(requests) == expected
    assert asked == [2]
    cached.dbdict.close()


def test_answers_end_as_gsm8k_has_it():
    from ladder_jax.evaluate.model import STOP

    assert list(STOP) == THEIRS["generation_kwargs"]["until"]


def test_what_tasks_ask_for(adapter):
    request = lambda **settings: adapter.request("the cat", settings, seed=3)
    found = request(until=["\n", ""], max_new_tokens=5, do_sample=True, top_p=0.5, num_beams=1)
    assert found == dataclasses.replace(
        found, stop=("\n",), max_new_tokens=5, temperature=1.0, top_p=0.5, seed=3
    )
    greedy = request(until="x", do_sample=False, temperature=0.7, repetition_penalty=1.2)
    assert (greedy.temperature, greedy.repetition_penalty, greedy.max_new_tokens) == (0.0, 1.2, 12)
    with refused("cannot honour the task's num_beams=4"):
        request(num_beams=4)
    with refused("no room"):
        request(max_gen_toks=64)


def test_chat_template(model, bytes_model, pieces):
    """A prompt of the template, whose beginning stands once, is what the conversation's own prompt
    is.
    """
    messages = [{"role": "user", "content": "the cat"}]
    from ladder_jax.evaluate.harness import LadderJax

    adapter = LadderJax(model)
    assert adapter.tok_encode(adapter.apply_chat_template(messages)) == pieces.chat(messages)
    assert adapter.tokenizer_name == pieces.name
    with refused("always asks for the next answer"):
        adapter.apply_chat_template(messages, add_generation_prompt=False)
    with refused("no chat template"):
        LadderJax(bytes_model).apply_chat_template(messages)


def test_by_name(run):
    """As `lm_eval --model ladder_jax --model_args checkpoint=...` makes it."""
    from lm_eval.api.registry import get_model

    import ladder_jax.evaluate.harness  # noqa: F401

    made = get_model("ladder_jax").create_from_arg_string(
        f"checkpoint={run},tensor=1", {"batch_size": 1}
    )
    assert made.max_length == WINDOW
    assert made.prefix_token_id == 10
    assert made.tok_encode("é") == [195, 169]


@pytest.mark.parametrize(
    "arguments, message",
    {
        "checkpiont=nowhere": "unknown argument 'checkpiont'; did you mean 'checkpoint'",
        "checkpoint=nowhere,window=9": "unknown argument 'window' .allowed: checkpoint, max_l",
        "checkpoint=nowhere,tenser=2": "unknown argument 'tenser'; did you mean 'tensor'",
    }.items(),
)
def test_a_mistake_in_its_arguments(arguments, message):
    from ladder_jax.evaluate.harness import LadderJax

    with refused(message):
        LadderJax.create_from_arg_string(arguments)


def test_a_mistake_of_its_command_is_one_line(tasks, monkeypatch, capsys):
    """Without the harness's own tasks, all of which it reads first, for seconds."""
    from lm_eval.tasks import TaskManager

    from ladder_jax.evaluate.harness import main

    local = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", local)
    command = "lm_eval --model ladder_jax --model_args checkpoint=nowhere --tasks local_rolling"
    command += f" --include_path {tasks}"
    monkeypatch.setattr("sys.argv", command.split())
    assert main() == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("ladder-jax: there is no model at 'nowhere'")
    )
