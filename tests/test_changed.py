"""`make test-changed` runs the tests that an edit reaches, the nearest first."""

import os
import subprocess
import sys

import pytest

from tests import changed

FILES = {
    "ladder_jax/__init__.py": "",
    "ladder_jax/low.py": "SIZE = 1",
    "ladder_jax/middle.py": "def size():\n    from ladder_jax import low\n    return low.SIZE",
    "ladder_jax/table.py": "WHERE = 'ladder_jax.middle:size'",
    "ladder_jax/other.py": "",
    "docs/guide.md": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "FIRST = []",
    "tests/test_low.py": "from ladder_jax.low import SIZE\n\n\ndef test_low():\n    assert SIZE == 1",
    "tests/test_middle.py": "import ladder_jax.middle\n\n\ndef test_middle():\n    pass",
    "tests/test_table.py": "from ladder_jax import table\n\n\ndef test_table():\n    assert table",
    "tests/test_other.py": "from ladder_jax import other\n\n\ndef test_other():\n    assert other is None",
    "tests/test_guide.py": "PAGE = 'docs/guide.md'",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests/changed.py").write_text((changed.ROOT / "tests/changed.py").read_text())
    author = ["-c", "user.name=A", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "begun"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def run(project, *words):
    command = [sys.executable, *"-m pytest -v -p tests.changed -p no:cacheprovider".split(), *words]
    # Bytecode would be a new file, and that of a file that was edited within a second would be run
    # in its place.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=environment)
    ran = [
        line.partition("::")[2].split()[0]
        for line in done.stdout.splitlines()
        if "::" in line and "[" in line
    ]
    return ran, done


def test_the_nearest_come_first_and_others_not_at_all(project):
    (project / "ladder_jax/low.py").write_text("SIZE = 2")
    ran, done = run(project)
    assert ran == ["test_low", "test_middle", "test_table"]
    assert "2 passed" in done.stdout
    assert "1 failed" in done.stdout
    assert done.returncode == 1


def test_no_test_begins_when_the_time_is_over(project):
    (project / "ladder_jax/middle.py").write_text("")
    assert "2 skipped" in run(project, "--within", "0")[1].stdout


def test_a_page_and_a_new_test_are_edits_and_a_commit_is_one_since_another(project):
    (project / "docs/guide.md").write_text("more")
    (project / "tests/test_new.py").write_text("def test_new():\n    pass")
    assert "2 files of tests reach them" in run(project)[1].stdout
    subprocess.run(["git", "stash", "-qu"], cwd=project, check=True)
    assert "0 edited files" in run(project)[1].stdout
    done = run(project, "--since", "nowhere")[1]
    assert done.returncode == 4
    assert "--since nowhere: fatal: bad revision" in done.stderr
    assert "Traceback" not in done.stderr
