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
    "tests/test_middle.py": """
import pytest
import ladder_jax.middle

@pytest.fixture(scope="module")
def made():
    yield
    print("module's end")

def test_slow(made):
    import time
    time.sleep(0.5)

def test_late(made):
    pass
""",
    "tests/test_table.py": "from ladder_jax import table\n\n\ndef test_table():\n    assert table",
    "tests/test_other.py": "from ladder_jax import other\n\n\ndef test_other():\n    assert other is None",
    "tests/test_guide.py": "PAGE = 'docs/guide.md'",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests" / "changed.py").write_text(
        (changed.ROOT / "tests" / "changed.py").read_text()
    )
    author = ["-c", "user.name=A", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "begun"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def run(project, *words):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "tests.changed",
        "-p",
        "no:cacheprovider",
        *words,
    ]
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
    (project / "ladder_jax" / "low.py").write_text("SIZE = 2")
    ran, done = run(project)
    assert ran == ["test_low", "test_slow", "test_late", "test_table"]
    assert "3 passed" in done.stdout and "1 failed" in done.stdout and done.returncode == 1


def test_what_time_leaves_is_named(project):
    """A file's share is a quarter, which the first test takes if there is time; what its module
    holds is let go.
    """
    (project / "ladder_jax" / "middle.py").write_text("")
    _, done = run(project, "--within", "1.6", "-s")
    assert "test_late SKIPPED" in done.stdout and done.returncode == 0
    assert ("module's end" in done.stdout) == ("test_slow PASSED" in done.stdout)
    _, done = run(project, "--within", "0")
    assert (
        "3 skipped" in done.stdout
        and "2 files that the edit can reach were not begun" in done.stdout
    )
    assert "tests/test_middle.py tests/test_table.py" in done.stdout


def test_a_page_and_a_new_test_are_edits_and_a_commit_is_one_since_another(project):
    (project / "docs" / "guide.md").write_text("more")
    (project / "tests" / "test_new.py").write_text("def test_new():\n    pass")
    assert "2 files of tests reach them" in run(project)[1].stdout
    subprocess.run(["git", "stash", "-qu"], cwd=project, check=True)
    assert "0 edited files" in run(project)[1].stdout
    done = run(project, "--since", "nowhere")[1]
    assert done.returncode == 4 and "--since nowhere: fatal: bad revision" in done.stderr
    assert "Traceback" not in done.stderr
