"""Programs that are compiled as one: XLA's compiler for CPUs makes equal kernels once, and that is
most of its work.
"""

import functools
import itertools
import re

import jax

ROWS = 16  # that are compiled as one: of more, one test that is asked for alone would wait long


def together(make, params):
    """A function of a row of `params` (pytest's) that gives its program's result, and its lines of
    the text.

    `make(*row)` gives a function to trace, and its arguments. When a row is asked for, up to ROWS
    are made; those on one mesh are one program.
    """
    rows = [
        [param.values for param in params if bool(param.marks) == marked]
        for marked in (False, True)
    ]
    batches = [batch for some in rows for batch in itertools.batched(some, ROWS)]
    of_batch = functools.cache(
        lambda index: dict(zip(batches[index], _run([make(*row) for row in batches[index]])))
    )
    places = {row: index for index, batch in enumerate(batches) for row in batch}
    return lambda *row: of_batch(places[row])[row]


def _run(made):
    """Each one's (result, lines of the optimised program that are its own, or nobody's)."""
    results = [None] * len(made)
    meshes = {}
    for index, (_, arguments) in enumerate(made):
        meshes.setdefault(jax.tree.leaves(arguments)[0].sharding.mesh, []).append(index)
    for members in meshes.values():
        program, arguments = _compile([made[index] for index in members])
        lines = program.as_text().splitlines()
        owners = [re.search(r'op_name="[^"]*\bprogram_(\d+)/', line) for line in lines]
        for place, (index, result) in enumerate(zip(members, program(arguments))):
            own = [
                line for line, owner in zip(lines, owners) if not owner or int(owner[1]) == place
            ]
            results[index] = result, "\n".join(own)
    return results


def _compile(made):
    functions, arguments = zip(*made)

    def all_of_them(arguments):
        results = []
        for place, (function, its) in enumerate(zip(functions, arguments)):
            # One after the other: all-reduces of two programs could be merged.
            its, results = jax.lax.optimization_barrier((its, results))
            with jax.named_scope(f"program_{place}"):
                results.append(function(*its))
        return results

    return jax.jit(all_of_them).lower(arguments).compile(), arguments
