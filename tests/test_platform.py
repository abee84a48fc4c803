"""With compilers for TPUs and GPUs installed and no such device, no command prints what jax's
plugins complain of.
"""

import json
import os
import types

import pytest

from ladder_jax.parallel import compiled
from tests.changed import ROOT

PLUGIN = """
import jax
def initialize():  # as the plugin for CUDA: it looks for a driver unless a platform is named
    if not jax.config.jax_platforms:
        raise RuntimeError("cuDNN not found")
"""
quiet = pytest.mark.skipif(
    compiled.has_accelerator(), reason="this machine has an accelerator: jax starts it"
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A process's that has jax choose its platform, with a plugin for GPUs in its path, beside the
    installed ones.
    """
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "jax_plugins/xla_cuda99").mkdir(parents=True)
    (folder / "jax_plugins/xla_cuda99/__init__.py").write_text(PLUGIN)
    return {
        "JAX_PLATFORMS": "",
        "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
    }


def test_the_plugin_complains(run_python, environment):
    """As jax is by itself: without this the tests below would show nothing."""
    done = run_python("-c", "import jax; jax.devices()", check_status=0, **environment)
    assert "RuntimeError: cuDNN not found" in done.stderr


@quiet
def test_in_a_notebook(run_python, environment):
    code = "import ladder_jax as lj; lj.Transformer; import jax; print(jax.devices()[0].platform, lj.make_mesh().size)"
    done = run_python("-c", code, **environment)
    assert (done.stdout, done.stderr) == ("cpu 1\n", "")


@quiet
def test_doctor(run_cli, environment):
    done = run_cli("doctor", "--json", **environment, check_status=0)
    report = json.loads(done.stdout)
    assert set(report["devices"]) == {"cpu"}
    assert done.stderr == ""
    assert all(one == "ok" or "pip install" in one for one in report["targets"].values())


def test_what_is_there_is_jaxs_to_choose(monkeypatch, tmp_path):
    """A named platform, a driver's file and a plugin for other hardware: each leaves jax alone."""
    chosen = []

    def choose(*, named=None, files=(), plugins=("xla_cuda13",)):
        update = lambda name, value: chosen.append((name, value))
        monkeypatch.setattr(
            compiled,
            "jax",
            types.SimpleNamespace(config=types.SimpleNamespace(jax_platforms=named, update=update)),
        )
        monkeypatch.setattr(compiled, "DRIVERS", files)
        monkeypatch.setattr(
            compiled,
            "entry_points",
            lambda group: [types.SimpleNamespace(name=name) for name in plugins],
        )
        compiled.prefer_cpu()

    (tmp_path / "nvidia0").touch()
    choose(files=[str(tmp_path / "nvidia*")])
    choose(named="cuda")
    choose(plugins=["xla_cuda13", "metal"])
    assert not chosen
    choose(files=[str(tmp_path / "accel*")])
    assert chosen == [("jax_platforms", "cpu")]
