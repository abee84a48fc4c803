"""The library's train step, prefill or decode step for a request, compiled in a process of its
own.
"""

import concurrent.futures
import logging
import logging.handlers
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ladder_jax import decode, nn, python, schedule, train
from ladder_jax.config import Phase, TrainConfig
from ladder_jax.decode import steps, weights
from ladder_jax.errors import UserError
from ladder_jax.overlap.compile import Record
from ladder_jax.overlap.request import Request
from ladder_jax.parallel import Compiled, make_mesh
from ladder_jax.schedule.targets import COMPILERS, Target


def program(request: Request) -> tuple[Compiled, tuple[Any, ...]]:
    """The program, and the shapes of its arguments with shardings on the target's devices."""
    mesh = make_mesh(
        fsdp=request.fsdp, tensor=request.tensor, devices=schedule.devices(request.target)
    )
    definition = nn.define(request.config, mesh=mesh, experts=request.experts)
    if request.trains:
        return training(definition, config=request.run().train)
    rows = request.batch
    settings = dict(loop=request.loop, quantize=request.quantize)
    if request.phase is Phase.PREFILL:
        step = decode.prefill(
            definition,
            capacity=request.context,
            launch=request.launch,
            sequence_parallel=request.sequence_parallel,
            collective_matmul=request.collective_matmul,
            interleave=request.interleave,
            **settings,
        )
        prompts = (rows, request.prompt_length)
        tokens, lengths = (
            jax.ShapeDtypeStruct(shape, jnp.int32, sharding=definition.layout.sharding(dims))
            for shape, dims in ((prompts, "BT"), ((rows,), "B"))
        )
        return step, (weights.abstract(definition, **settings), tokens, lengths)
    decode_loop = decode.decode_many(
        definition, choice=decode.Choice.GREEDY, launch=request.launch, **settings
    )
    return decode_loop, steps.abstract(definition, rows=rows, positions=request.context, **settings)


def training(definition: nn.ModelDef, *, config: TrainConfig) -> tuple[Compiled, tuple[Any, ...]]:
    """The step of `ladder-jax train`, and the shapes of its arguments."""
    state = train.abstract_state(definition, config=config)
    batch = train.abstract_batch(definition, config=config)
    return train.train_step(definition, config=config), (state, batch)


def compiler(target: Target) -> str:
    """The compiler's name and version."""
    found = python.versions(*COMPILERS[target.platform])
    return next(f"{name} {version}" for name, version in found.items())


def bytes_minimum(request: Request, arguments: tuple[Any, ...]) -> int | None:
    """Bytes that one device must read in a decode step: its shards of the weights and of the
    caches, each once.

    The embedding table is left out if the head is another table: a step reads only its tokens'
    rows. So are experts that no token chooses, if all are evenly loaded.
    """
    if request.phase is not Phase.DECODE:
        return None
    params, caches, *_ = arguments
    if "head" in params:
        params = {name: value for name, value in params.items() if name != "embedding"}
    total = 0.0
    for path, array in jax.tree.leaves_with_path((params, caches)):
        size = weights.shard_bytes(array)
        routed = any(getattr(key, "key", None) == "experts" for key in path)
        if routed:  # without those that fill up the last ranks
            moe = request.config.moe
            size *= moe.chosen(request.batch) * moe.experts / moe.padded(request.tensor)
        total += size
    return round(total)


def record(request: Request, dump: str | None = None) -> Record:
    """Compile the request's program; with `dump`, the folder named in XLA_FLAGS, only until it is
    scheduled: machine code takes 90 % of a train step's compilation.
    """
    notices = logging.handlers.BufferingHandler(1000)
    logging.getLogger("ladder_jax").addHandler(notices)
    started = time.perf_counter()
    try:
        function, arguments = program(request)
        if dump is None:
            compiled = function.compile(*arguments)
            hlo = compiled.as_text()
            analysis = _analysis(compiled)
        else:
            hlo = scheduled(function, arguments=arguments, folder=pathlib.Path(dump))
            analysis = {}
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0][:400]
        raise UserError(f"the compiler for {request.target.name} fails: {reason}") from None
    return Record(
        hlo=hlo,
        jax=jax.__version__,
        compiler=compiler(request.target),
        options=function.options,
        launch=function.traits.launch.value,
        notices=[entry.getMessage() for entry in notices.buffer],
        seconds=time.perf_counter() - started,
        bytes_minimum=bytes_minimum(request, arguments),
        **analysis,
    )


def sizes(compiled: jax.stages.Compiled) -> dict[str, int]:
    """The program's bytes on one device by purpose, at the peak; outputs without those that reuse an
    argument's memory.
    """
    memory = compiled.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
    }


def _analysis(compiled: jax.stages.Compiled) -> dict:
    try:
        costs = compiled.cost_analysis() or {}
    except (NotImplementedError, RuntimeError):  # NVIDIA's compiler has none ahead of time
        costs = {}
    return {
        "bytes_accessed": costs.get("bytes accessed"),
        "bytes_per_device": sum(sizes(compiled).values()),
    }


def scheduled(function: Compiled, *, arguments: Sequence, folder: pathlib.Path) -> str:
    """The scheduled program's text. The compiler still runs in a thread afterwards: the caller ends
    the process.

    XLA dumps a module once the order of operations is final and buffers are assigned, before it
    generates machine code. Raises the compiler's error if it fails before the dump. Later errors,
    such as too little vector memory, go unseen.
    """
    compile_whole = lambda: function.compile(*arguments).as_text()
    compiled = concurrent.futures.ThreadPoolExecutor(1).submit(compile_whole)
    while not compiled.done():
        for path in folder.glob("*.after_optimizations.txt"):
            text = path.read_text(errors="replace")
            # the entry comes last, so the file is complete
            if "\nENTRY " in text and text.rstrip().endswith("\n}"):
                return text
        time.sleep(0.1)
    return compiled.result()
