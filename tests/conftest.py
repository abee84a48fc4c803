"""Eight simulated devices, strict jax settings, and compilations shared between tests and runs."""

import collections
import functools
import gc
import itertools
import os
import pathlib
import pkgutil
import resource
import signal

# A shell ignores it for what runs in the background, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# each process that tests start would compile all sources again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# readline sets it where it finds no terminal, and answers would be wrapped
os.environ.pop("COLUMNS", None)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Collectives of eight devices need patience on two cores. Machine code is hardly optimised: that is
# most of what a compilation costs, and changes neither the collectives nor, beyond rounding, the
# numbers.
FLAGS = "--xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_backend_optimization_level=0"
GIVEN = os.environ.get("XLA_FLAGS", "")
if FLAGS not in GIVEN:  # a worker inherits them; a second time, its programs had other keys
    os.environ["XLA_FLAGS"] = f"{GIVEN} {FLAGS}".strip()
# Shared by all workers and inherited by the processes that they start; keyed by jax's own version
# and the program. Small programs as well: what a process has compiled, or a file whose programs
# have gone, the next only reads.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parent.parent / ".cache/jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# jax writes an entry in place: what reads a half of it warns and compiles, and the processes'
# output is compared.
os.environ.setdefault("PYTHONWARNINGS", "ignore:Error reading persistent compilation cache entry")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing makes millions of objects that live on: looking for cycles among them as often as usual
# costs a tenth.
gc.set_threshold(100_000, 50, 100)


# What takes longest comes first, in this order: a file is one worker's, and at the end the others
# would be idle. Files that wait for processes stand between those that compile.
FIRST = """
    test_numerics test_interleave test_remote test_decode test_docs test_explicit test_agreement test_meshes
    test_commands test_names test_process test_experts test_expert_training test_expert_inference test_resume
    test_bench test_gradients_bfloat16 test_generate test_training test_refit test_fuzz_configurations test_cli
    test_watchdog test_policy test_retrain test_exchange test_sampling test_connections test_smoke test_overlap
    test_command test_decode_program test_rings test_dataset test_combinations test_chunks test_int8
""".split()


def pytest_collection_modifyitems(config, items):
    # one of several: by itself pytest keeps the order of the command line
    if hasattr(config, "workerinput"):
        place = {name: index for index, name in enumerate(FIRST)}
        items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))


def pytest_terminal_summary(terminalreporter):
    """The files that took longest, in seconds of a worker: where to look when the suite has become
    slow.
    """
    seconds = collections.Counter()
    tests = collections.Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            file = report.nodeid.partition("::")[0]
            seconds[file] += report.duration
            tests[file] += report.when == "call"
    if seconds.total() > 60:
        terminalreporter.section(f"{seconds.total():,.0f} s of {len(seconds)} files; the slowest")
        for file, taken in seconds.most_common(15):
            terminalreporter.write_line(f"{taken:7.0f} s {tests[file]:5d} tests  {file}")


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Lets a module's programs go with it: each holds memory maps, of which Linux allows a process
    65,530.
    """
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    """A text to train on."""
    path = tmp_path_factory.mktemp("data") / "book.txt"
    path.write_text(
        "".join(f"line {i} of a little book about {i % 7} things\n" for i in range(2000))
    )
    return path


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A run's folder with one checkpoint, of large matrices beside a short cache."""
    from tests import cases, starts

    folder = tmp_path_factory.mktemp("wide")
    starts.save(folder / "checkpoints", cases.define("ladder", **starts.WIDE))
    return folder


@pytest.fixture(scope="session")
def run_python(tmp_path_factory):
    """Runs Python in a process of its own; returns the CompletedProcess."""
    import subprocess
    import sys

    def run(*words, cwd=None, timeout=300, check_status=None, **environment):
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd or tmp_path_factory.mktemp("cwd"),
            env={**os.environ, **environment},
        )
        if check_status is not None:
            assert done.returncode == check_status, (done.returncode, done.stdout, done.stderr)
        return done

    return run


@pytest.fixture(scope="session")
def run_cli(run_python):
    """`ladder-jax` likewise, as a user would."""
    return functools.partial(run_python, "-m", "ladder_jax")


@pytest.fixture
def mistake(capsys, tmp_path, monkeypatch):
    """Runs a command that must refuse, in a folder of its own: gives the one line that it says;
    nothing is written.
    """
    monkeypatch.chdir(tmp_path)

    def run(*words):
        from ladder_jax import cli

        before = sorted(os.listdir())
        assert cli.main([*map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        assert sorted(os.listdir()) == before
        return err

    return run


@pytest.fixture
def prints(capsys):
    """Runs a command in this process: gives what it prints."""

    def run(*words):
        from ladder_jax import cli

        assert cli.main([*map(str, words)]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.fixture
def compiled_here(monkeypatch, tmp_path):
    """What a command compiles in a process of its own is compiled in this one, and kept by the
    test.
    """
    from ladder_jax.overlap import compile as compiling

    here = lambda function, *arguments, **_: pkgutil.resolve_name(function)(*arguments)
    monkeypatch.setattr(compiling, "apart", here)
    monkeypatch.setenv("LADDER_JAX_CACHE", str(tmp_path))


@pytest.fixture
def largest_file():
    """Sets how long a file may become: then writes are short, and the next one is an error, as on a
    full disk.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(
        resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1])
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)
