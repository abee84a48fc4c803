"""README and site: what is shown there runs, exists, and is what the results say."""

import ast
import doctest
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.parse

import jax
import numpy as np
import pytest
import yaml
from flax import nnx

import ladder_jax
from experiments import study
from experiments.plan import __main__ as plan_study
from experiments.refit import __main__ as refit_study
from ladder_jax import nn
from tests import cases
from tests.changed import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(
    [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("guides/*.md"), *DOCS.glob("api/*.md")]
)
README = (ROOT / "README.md").read_text()
NOTEBOOKS = sorted((ROOT / "experiments/notebooks").glob("*.ipynb"))


def name(path):
    return str(path.relative_to(ROOT))


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.S | re.M)


def prose(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def on_one_line(text):
    return " ".join(text.split())


def executed(*code):
    """The names that code, of one page, defines."""
    scope = {}
    for block in code:
        exec(compile(block, "page.md", "exec"), scope)  # noqa: S102
    return scope


def assert_learns(losses):
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]


def test_a_command_in_a_help_is_one_line():
    """One is copied from there as it stands."""
    for path in (ROOT / "experiments").rglob("*.py"):
        shown = ast.get_docstring(ast.parse(path.read_text())) or ""
        for after in re.findall(r"^    .*python -m .*\n(?=(.*))", shown, re.M):
            assert not after or "python -m " in after, (name(path), after)


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "pycon")], ids=name)
def test_examples_print_what_stands_there(path):
    text = "\n".join(blocks(path, "pycon"))
    example = doctest.DocTestParser().get_doctest(text, {}, name(path), str(path), 0)
    failed, attempted = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert attempted and not failed  # each failure is printed


@pytest.mark.parametrize("page", ["quickstarts.md", "checkpoints.md", "guides/training.md"])
def test_snippets_run(page):
    for block in blocks(DOCS / page, "python"):
        executed(block)


def test_the_first_snippet_of_the_readme():
    first, *_ = blocks(ROOT / "README.md", "python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 14
    logits = executed(first)["logits"]
    assert logits.shape == (2, 16, 256)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()


YOUR_MODEL = blocks(DOCS / "guides/your_model.md", "python")
BOUND = cases.bound(cases.model(d_model=64, d_ff=128))
NNX = slice(0, 4)
AUDITED = slice(0, 5)
LINEN = slice(5, 7)


@pytest.mark.parametrize("which", [NNX, LINEN], ids=["nnx", "linen"])
def test_your_own_model_trains(which):
    scope = executed(*YOUR_MODEL[which])
    assert_learns(scope["losses"])
    assert scope["train_step"]._cache_size() == 1


def as_standard(code):
    return code.replace('"ladder", num', '"standard", num')


def test_your_own_model_as_a_standard_is_the_plain_one():
    """With the plain model's values, on a mesh and on one device: only the topology makes the
    difference.
    """
    scope = executed(*map(as_standard, YOUR_MODEL[:3]))
    plain = scope["Plain"](rngs=nnx.Rngs(1))
    alone = scope["Ladder"](rngs=nnx.Rngs(0), axes=())
    stacked = jax.tree.map(
        lambda *layers: np.stack(layers), *(nnx.state(block) for block in plain.blocks)
    )
    nnx.update(alone, {**nnx.state(plain), "blocks": {"layers": stacked}})
    split = scope["Ladder"](rngs=nnx.Rngs(0))
    nnx.update(split, nnx.state(alone))
    _, params, forward = scope["parts"](scope["mesh"], split)
    tokens = np.arange(32).reshape(4, 8)
    call = nnx.jit(lambda model, tokens: model(tokens))
    expected = call(plain, tokens)
    assert cases.error(call(alone, tokens), expected) < BOUND
    assert cases.error(forward(params, tokens), expected) < BOUND


def shallow(code):
    """With one layer of our model: a quarter to compile."""
    return code.replace('preset("tiny", ', 'preset("tiny", num_layers=1, ')


EXPLICIT = blocks(DOCS / "guides/explicit.md", "python")


def test_the_explicit_model_trains_beside_one_of_ours(capsys):
    with jax.set_mesh(None):  # the page sets one
        assert_learns(executed(*map(shallow, EXPLICIT))["losses"])
    assert capsys.readouterr().out.splitlines()[:2] == ["True", "float32[8@dp,16,8@tp]"]


def test_the_explicit_model_as_a_standard_is_the_plain_one():
    with jax.set_mesh(None):
        scope = executed(*map(as_standard, EXPLICIT[:2]))
        params = scope["initial"](jax.random.key(0))
        tokens = np.arange(32).reshape(4, 8)
        ladder, plain = (jax.jit(scope[name])(params, tokens) for name in ("ladder", "plain"))
    assert cases.error(ladder, plain) < BOUND


@pytest.mark.audit
def test_your_own_model_hides_its_all_reduces():
    """In a process of its own, as in a notebook: nothing is set before jax is imported."""
    ours = re.compile("JAX_|TPU_|XLA_")
    plain = {name: value for name, value in os.environ.items() if not ours.match(name)}
    environment = {**plain, "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-c", "".join(YOUR_MODEL[AUDITED])]
    said = subprocess.check_output(command, cwd=ROOT, env=environment, text=True, timeout=600)
    assert said.splitlines()[-1] == "8 of 9"


def test_the_snippet_that_serves(capsys):
    (snippet,) = [
        block for block in blocks(DOCS / "guides/inference.md", "python") if "Engine(" in block
    ]
    executed(shallow(snippet))
    *pieces, last = capsys.readouterr().out.splitlines()
    assert len([token for piece in pieces for token in eval(piece)]) == 40  # noqa: S307
    assert last.split()[0] in ("stop", "length")


def commands(path):
    """Those in indented blocks, which are whole; comments and shell operators cut off."""
    text = path.read_text().replace("\\\n", " ")
    found = re.findall(r"^    (?:[A-Z_]+=\S+ )*ladder-jax (.*)$", text, re.M)
    return [re.split(r" #| && | \| ", one)[0] for one in found if "..." not in one]


def test_the_tables_of_the_plans_study_are_its_rows():
    """Of compiled programs; the other studies' tests have theirs."""
    rows = study.load(plan_study.HERE / "results.json")["rows"]
    text = (plan_study.HERE / "README.md").read_text()
    assert study.fill(text, plan_study.tables(rows)) == text


STUDIES = sorted(ROOT.glob("experiments/**/README.md"))
each_page = pytest.mark.parametrize("path", [*PAGES, *STUDIES], ids=name)


@each_page
def test_a_study_is_there_or_names_its_commit(path):
    """In the same block."""
    for block in re.split(r"\n\s*\n", path.read_text()):
        if re.search(r"at commit [0-9a-f]{7}", block):
            continue
        for module in re.findall(r"python\s+-m\s+(experiments[\w.]*\w)", block):
            place = ROOT / module.replace(".", "/")
            is_there = place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()
            assert is_there, module


@each_page
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text())):
        if not urllib.parse.urlsplit(target).scheme:
            assert (path.parent / target.partition("#")[0]).exists(), target


OTHERS = "Terminating process", "Cannot access gated repo"  # messages of jax and of the Hub


def test_the_messages_of_troubleshooting_are_said():
    """Three words in a row of each, as the rest may be values."""
    code = [ast.parse(path.read_text()) for path in (ROOT / "ladder_jax").rglob("*.py")]
    texts = [n.value for tree in code for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    said = " ".join(filter(lambda text: isinstance(text, str), texts))
    quoted = re.findall(r"^\| `(.*?)`", (DOCS / "troubleshooting.md").read_text(), re.M)
    for message in quoted:
        words = message.split()
        threes = [" ".join(words[at : at + 3]) for at in range(len(words) - 2)]
        assert message.startswith(OTHERS) or any(three in said for three in threes), message


def test_the_table_is_what_was_measured_and_is_predicted():
    rows = re.findall(
        r"^\| Llama-3-70B, H100s, (.*?), (\d) x (\d+) \| (\S+) \| (\S+) \|", README, re.M
    )
    assert len(rows) == 4
    kept = study.load(ROOT / "experiments/predict/results.json")["published"]
    speeds = {(row["link"], row["tensor"], row["batch"], row["residual"]): row for row in kept}
    for link, tensor, batch, *shown in rows:
        place = {"NVLink": "nvlink", "no NVLink": "off"}[link], int(tensor), int(batch)
        ladder, standard = (speeds[*place, residual] for residual in ("ladder", "standard"))
        assert shown == [
            f"{ladder[what] / standard[what]:.2f}" for what in ("measured", "predicted")
        ]
    of_card = study.load(ROOT / "experiments/one_gpu/results.json")["dense"]["rows"]
    standard, ladder = (row["tokens_per_second"] for row in of_card if row["batch"] == 1)
    # The median of the paired repeats, as `bench` says it; the ratio of the medians is 0.01 from it
    # at most.
    assert "| Llama-3-8B, one H200, 1 x 1, 128 tokens | 1.02 | 1.00 | we:" in README
    assert abs(ladder / standard - 1.02) < 0.01


SPEED = re.compile(r"speed|faster|tokens/s|tokens a second|latency|less time|first token", re.I)
RATIO = re.compile(
    r"(?<![\d.])[0-3]\.\d{1,2}(?!\d|\.\d| ?(%|ms|µs|GB|B\b|million|points))|\b\d+ % (faster|less (time|latency))"
)
OPPONENT = re.compile(
    r"fastest Standard|Standard (with|over `fsdp`)|Standard's with NCCL|Standard's on one device|on one CPU device"
    r"|over (vLLM|Megatron|tensor parallelism|the same|one sequence|standard Transformers|a ring)|than the serial form"
    r"|NCCL takes|against no opponent"
)
EVIDENCE = re.compile(r"ladder-jax |python -m |make [a-z]|https?://")


def speeds_without_opponent(text):
    """Blocks and table rows with a ratio of speeds whose section names no opponent, or no command
    or source.

    A row's opponent may stand in its table's head, or in the paragraph before the table.
    """
    found = []
    for section in re.split(r"^#+ .*$", prose(text), flags=re.M):
        before = ""
        for block in re.split(r"\n\s*\n", section):
            head = ""
            stated = [block]
            if block.startswith("|"):
                first, *stated = block.splitlines()
                head = before + first
            elif block.startswith("    "):
                continue
            elif not block.startswith("<!--"):
                before = block
            for what in stated:
                if not SPEED.search(head or what):
                    continue
                if not RATIO.search(re.sub(r"`[^`]*`", "", what)):
                    continue
                around = on_one_line(head + what)
                if not (OPPONENT.search(around) and EVIDENCE.search(section)):
                    found.append(what)
    return found


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_a_speed_names_its_opponent_and_its_command(path):
    assert not speeds_without_opponent(path.read_text())


@pytest.mark.parametrize(
    "text",
    [
        "# A\n\nLadder is 1.31 times as fast: faster than ever.\n\n    ladder-jax predict\n",
        "# A\n\nLadder's speed over Standard with NCCL is 1.31.\n",
        "# A\n\nSpeeds:\n\n| model | ladder |\n|---|---|\n| 70B | 1.31 |\n\n    ladder-jax predict\n",
    ],
)
def test_a_speed_without_them_is_noticed(text):
    assert len(speeds_without_opponent(text)) == 1


MODELS = (DOCS / "guides/models.md").read_text()
REFIT = ROOT / "experiments/refit"
REFITTED = study.load(REFIT / "results.json")["rows"]
FITTED = dict(tokens=12_288, seed=0, ridge=1e-3)


def losses(**wanted):
    """Of the refit study's row of these settings that scores most domains."""
    kind = {"residual": "ladder", **wanted}
    rows = [row["losses"] for row in REFITTED if kind.items() <= row.items()]
    return max(rows, key=len)


def test_the_refits_are_what_was_measured():
    at = lambda **wanted: f"{losses(**wanted)['wikitext']:.3f}"
    assert f"| nothing: the original | {at(layers='0', way='plain')} |" in README
    for words, kind in (
        ("the last 15 of 30 layers, ladder", dict(layers="15")),
        ("all 30 layers, ladder", dict(layers="30")),
        (
            "the last 15, ladder-2: two sublayers to hide under",
            dict(layers="15", residual="ladder-2"),
        ),
    ):
        fitted = at(**kind, way="inputs", text="wikitext", **FITTED)
        assert f"| {words} | {at(**kind, way='plain')} | {fitted} |" in README


def test_the_costs_of_conversions_are_what_was_measured():
    """The guide to models: what each costs when it is refitted, and what tasks say."""
    measured = refit_study.kinds(REFITTED)
    for kind, residual in (
        ("half", "ladder-fresh"),
        ("half", "ladder-2"),
        ("half", "parallel-ladder"),
        ("all", "ladder"),
    ):
        layers = "last 15" if kind == "half" else "all 30"
        named = layers if residual == "ladder" else f"{layers}, {residual}"
        (cost,) = re.search(rf"\| {named} \| \S+ \| \S+ \| \S+ \| (\S+) \|", measured).groups()
        assert f"| {kind}, `{residual}` | {cost} |" in MODELS
    page = (REFIT / "README.md").read_text()
    rows = re.findall(
        r"^\| (plain|refitted) \| [^|]* \| [^|]* \| [^|]* \| \+([^|]*) \|$", page, re.M
    )
    shown = re.search(
        r"the plain\sconversion costs (\S+ ± \S+) and the refitted one (\S+ ± \S+) ", MODELS
    ).groups()
    assert dict(rows) == dict(zip(("plain", "refitted"), shown))


def test_what_fitted_outputs_give_back_is_what_was_measured():
    mixed = dict(text="mixture", **FITTED)
    for shown, asked in (
        ("nothing: the original", dict(layers="0", way="plain")),
        ("`--refit none`", dict(layers="15", way="plain")),
        ("`--refit inputs`", dict(layers="15", way="inputs", **mixed)),
        ("`--refit both`", dict(layers="15", way="inputs and outputs", **mixed)),
    ):
        assert (
            f"| {shown} | {' | '.join(f'{loss:.3f}' for loss in losses(**asked).values())} |"
            in MODELS
        )


@pytest.fixture
def predicted(prints):
    """What `ladder-jax predict` answers, as JSON, and the speedups by topology."""

    def ask(words):
        answer = json.loads(prints(*shlex.split(words), "--json"))
        return answer, {row["residual"]: f"{row['speedup']:.2f}" for row in answer["rows"]}

    return ask


def shown_predictions():
    rows = re.findall(
        r"^\|[^|]*\| ([^|]+) \| (\d\.\d\d)(: no)? \| (\d\.\d\d) \| `ladder-jax (predict [^`]+)` \|$",
        README,
        re.M,
    )
    assert len(rows) >= 8
    assert README.index("Ladder over it") < README.index("who measured")
    return rows


@pytest.mark.parametrize("row", shown_predictions(), ids=lambda row: row[4])
def test_the_first_table_is_what_predict_prints(row, predicted):
    opponent, ladder, no, over_nccl, words = row
    answer, speedups = predicted(f"{words} --residual standard,ladder")
    assert (speedups["ladder"], f"{answer['rows'][1]['speedup_over_nccl']:.2f}") == (
        ladder,
        over_nccl,
    )
    assert bool(no) == answer["recommendation"]["reason"].startswith("no: ")
    assert f" Standard ({opponent})" in answer["recommendation"]["reason"]


def test_the_speeds_of_alternatives_are_what_predict_prints(predicted):
    text = on_one_line((DOCS / "alternatives.md").read_text())
    large, small = re.search(
        r"over 8 H100 (\S+) for 70B and (\S+) for 8B, predicted", text
    ).groups()
    ring = r"gains most: (\S+) and (\S+) for 70B at batch 16 over Standard with ring"
    slow, parallel = re.search(ring, text).groups()
    for words, expected in (
        ("--model llama-3-70b --hardware h100-nvlink", {"ladder": large}),
        ("--model llama-3-8b --hardware h100-nvlink", {"ladder": small}),
        (
            "--model llama-3-70b --hardware h100-no-nvlink --batch 16",
            {"ladder": slow, "parallel-ladder": parallel},
        ),
    ):
        assert f"ladder-jax predict {words}" in text
        assert expected.items() <= predicted(f"predict {words}")[1].items()


def test_a_faster_kernel_of_the_opponents(predicted, tmp_path, monkeypatch):
    text = (DOCS / "alternatives.md").read_text()
    (yaml_text,) = re.findall(r"^    (based_on: .*\n)    (link: .*\n)", text, re.M)
    (tmp_path / "fast.yaml").write_text("".join(yaml_text))
    monkeypatch.chdir(tmp_path)
    kernel = r"same kernel is (\S+) in place of (\S+), and (\S+) with a chained launch: no"
    with_it, without, chained = re.search(kernel, text).groups()
    for words, expected in (
        ("h100-nvlink", without),
        ("fast.yaml", with_it),
        ("fast.yaml --launch chained", chained),
    ):
        command = f"predict --model llama-3-70b --hardware {words}"
        assert f"ladder-jax {command}\n" in text
        answer, speedups = predicted(f"{command} --residual standard,ladder")
        assert speedups["ladder"] == expected
    assert answer["recommendation"]["reason"].startswith("no: ")
    assert f"in the first two rows {with_it} and {chained} times" in on_one_line(README)


def test_the_speed_over_the_fastest_standard_in_the_pretraining_study(predicted):
    text = (ROOT / "experiments/pretrain/README.md").read_text()
    words = re.search(r"^    ladder-jax (predict .* --batch 4)$", text, re.M)[1]
    answer, speedups = predicted(words)
    assert answer["baseline"]["interleave"] == 2
    shown = f"over one in two halves Ladder has {speedups['ladder']} times the speed"
    assert shown in on_one_line(text)


def test_the_advice_is_what_predict_prints(prints):
    text = (DOCS / "guides/speed.md").read_text()
    (words, quoted) = re.search(
        r"^    ladder-jax (predict .*)\n\n((?:    .*\n)+)", text, re.M
    ).groups()
    said = on_one_line(prints(*shlex.split(words)))
    assert said.startswith(on_one_line(quoted) + " llama-3-70b")


def test_the_speeds_of_conversions_are_what_predict_says(predicted):
    """The table of the guide to models, a row a conversion; a command for each machine, of a half
    and of all layers.
    """
    (words,) = re.findall(
        r"^    ladder-jax (predict .*) \\\n        (--residual .*)$", MODELS, re.M
    )
    rows = re.findall(
        r"^\| (half|all), `([\w-]+)` \| .* \| (\d\.\d+) \| (\d\.\d+) \|$", MODELS, re.M
    )
    assert len(rows) == 7
    for column, machine in ((2, "h100-nvlink"), (3, "h100-no-nvlink")):
        for which, left_out in (("half", ""), ("all", " --ladder-layers 40")):
            _, speedups = predicted(
                " ".join(words).replace("h100-no-nvlink", machine).replace(left_out, "")
            )
            shown = {row[1]: row[column] for row in rows if row[0] == which}
            assert shown and shown.items() <= speedups.items(), (machine, which)


def test_notebooks_have_the_outputs_of_a_run_without_errors():
    assert len(NOTEBOOKS) == 7
    for path in NOTEBOOKS:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if "outputs" in cell]
        numbers = [cell["execution_count"] for cell in cells]
        assert numbers == list(range(1, len(cells) + 1)), path.name
        outputs = [output for cell in cells for output in cell["outputs"]]
        kinds = {output.get("name", output["output_type"]) for output in outputs}
        assert kinds and not kinds & {"error", "stderr"}, path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_what_notebooks_import_is_there(path):
    """`make notebooks` runs them whole."""
    cells = json.loads(path.read_text())["cells"]
    code = "".join(line.rstrip() + "\n" for cell in cells for line in cell["source"])
    executed(*re.findall(r"^(?:import|from) (?:ladder_jax|experiments).*\n", code, re.M))


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == ladder_jax.__version__
    assert cited["license"] == "Apache-2.0"
    assert "2501.06589" in cited["references"][0]["identifiers"][0]["value"]


def test_shapes_that_the_format_names():
    definition = nn.define(ladder_jax.preset("tiny"), mesh=ladder_jax.make_mesh())
    text = on_one_line((DOCS / "checkpoints.md").read_text())
    sizes = {}
    for path, dims in re.findall(r"`([\w/]+)` \[(\w(?:, \w)*)\]", text):
        array = definition.abstract
        for part in path.split("/"):
            array = array[part]
        for letter, size in zip(dims.split(", "), array.shape, strict=True):
            assert sizes.setdefault(letter, size) == size
    assert sizes["L"] == 4
    assert sizes["D"] == 128
    assert sizes["N"] * sizes["H"] == 128
