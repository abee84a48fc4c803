"""What is installed with `pip install ladder-jax` suffices, but for what says which extra it
needs.
"""

import pathlib

from packaging.requirements import Requirement

# Of the extras: nothing that requirements.txt names, or that those packages bring.
OPTIONAL = (
    "matplotlib datasets pyarrow fastapi uvicorn prometheus_client safetensors gguf lm_eval wandb torch transformers"
    " pytest hypothesis openai xdist"
).split()
WITHOUT = f"""
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Without())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.partition(".")[0] in {OPTIONAL} else find_spec(name, *more)
"""
# Modules that nothing imports but the verb or the library which needs their extra.
NEED_AN_EXTRA = {
    "ladder_jax.evaluate.harness": "datasets lm_eval",  # lm-eval brings datasets
    "ladder_jax.serve": "fastapi uvicorn prometheus_client",
    # a file for others, who have these
    "ladder_jax.pretrained.huggingface.modeling_ladder": "torch transformers",
}


# A version of each that does not do: the newest below, or the first above.
FAILS = dict(
    jinja2="3.1.5",  # before 3.1.6 strangers' templates could leave its sandbox (CVE-2025-27516)
    jax="0.11.0",  # a scan over a mesh of several ranks has another type
    flax="0.12.9",  # cannot be imported with jax 0.11.2
    grain="0.2.14",  # an iterator that reads ahead cannot be closed
    tokenizers="1.0",  # its release candidate has neither Tokenizer.from_str nor models, decoders
)


def test_versions_that_fail_are_not_allowed():
    lines = (pathlib.Path(__file__).parent.parent / "requirements.txt").read_text().splitlines()
    required = {
        one.name: one.specifier
        for one in map(Requirement, (line for line in lines if line[0] != "#"))
    }
    assert not [name for name, version in FAILS.items() if version in required[name]]
    assert "3.1.6" in required["jinja2"]


VERBS = """
import contextlib, io
import ladder_jax
from ladder_jax.cli import main, verbs
for verb in verbs.VERBS:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            status = main([verb, "--help"])
        except SystemExit as end:
            status = end.code
    assert not status and "example:" in said.getvalue(), (verb, status, said.getvalue())
print(len(verbs.VERBS))
"""


def test_every_verbs_help_needs_no_extra(run_python):
    assert int(run_python("-c", WITHOUT + VERBS, check_status=0).stdout) > 8


MODULES = """
import pkgutil
import ladder_jax
for module in pkgutil.walk_packages(ladder_jax.__path__, "ladder_jax.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print(module.name, error.name.partition(".")[0])
"""


def test_every_module_but_an_extras_own_can_be_imported(run_python):
    done = run_python("-c", WITHOUT + MODULES, check_status=0)
    for module, missing in (line.split() for line in done.stdout.splitlines()):
        allowed = [needs for prefix, needs in NEED_AN_EXTRA.items() if module.startswith(prefix)]
        assert allowed and missing in allowed[0].split(), (module, missing)


PICTURES = """
from ladder_jax.cli import main
for words in (
    "predict --model tiny --hardware h100-nvlink",
    "overlap --model tiny --residual ladder --target cpu:8 --phase decode",
    "bench --model tiny --residual ladder",
):
    print(words.split()[0], main([*words.split(), "--plot", "picture.png"]))
"""


def test_a_picture_names_its_extra_before_the_work(run_python, tmp_path):
    done = run_python("-c", WITHOUT + PICTURES, cwd=tmp_path)
    said = "ladder-jax: --plot picture.png: a picture needs matplotlib: pip install 'ladder-jax[plot]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "predict 2\noverlap 2\nbench 2\n",
        3 * said,
    )
    assert not list(tmp_path.iterdir())
