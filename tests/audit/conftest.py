"""Programs that are compiled for absent hardware, once a module, beside the tests that read them."""

import concurrent.futures

import pytest

from ladder_jax.config import Loop, Phase, Remat
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import result
from ladder_jax.overlap.compile import Until
from ladder_jax.schedule import targets

LAYERS = 4
SERVING = (Phase.PREFILL, Phase.DECODE)


def case(target, phase, residual="ladder", loop=Loop.UNROLLED, *, model="llama-3-70b", full, **more):
    """A parameter `request_`. full: whether `make audit-sample` leaves it out."""
    settings = dict(target=target, phase=phase, residual=residual, loop=loop, **more)
    request = requests.make(model=model, layers=LAYERS, **settings)
    named = (f"{k}={getattr(v, 'value', v)}" for k, v in more.items())
    words = (model, residual, phase.value, request.loop.value, *named, target)
    return pytest.param(request, id="-".join(words), marks=pytest.mark.full if full else ())


@pytest.fixture(scope="module")
def compiled(request):
    """Compiles what the module's chosen tests have as `request_`, in their order; a function that waits for one."""
    items = (item for item in request.session.items if item.module is request.module and hasattr(item, "callspec"))
    chosen = dict.fromkeys(item.callspec.params["request_"] for item in items if "request_" in item.callspec.params)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        compile_one = lambda one: pool.submit(compiling.compiled, one, until=until(one))
        records = {one: compile_one(one) for one in chosen if not absent(one)}

        def wait(one):
            if reason := absent(one):
                pytest.skip(reason)  # what `ladder-jax doctor` says of this machine
            if one not in records:  # another's counterpart
                records[one] = compile_one(one)
            return result.read(one, records[one].result())

        yield wait
        pool.shutdown(cancel_futures=True)


def until(request):
    """How far it is compiled: see test_overlap.py."""
    plain = request.model == "llama-3-70b" and request.residual == "ladder" and request.remat is Remat.NONE
    plain = plain and request.loop is Loop.SCAN
    whole = plain and request.target.kind in ("v5e", "v6e")
    return Until.SCHEDULE if request.phase is Phase.TRAIN and not whole else Until.CODE


def absent(request):
    """TPU targets are always compiled for; GPU targets where the plugin is installed."""
    return request.target.platform == "cuda" and targets.not_installed(request.target)
