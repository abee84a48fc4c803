"""Grouped matmuls on NVIDIA GPUs: a Triton kernel, written in Pallas. Letters as in nn/experts.py.

XLA multiplies every row with every group's matrix there. These kernels visit tiles of rows that
belong to one group: an empty group's matrix is not read, and the rows behind the last group are
neither read nor written.

jax compiles such kernels with the Triton in XLA, and has announced to remove that (the Pallas
changelog, 0.11.0). XLA is to have grouped matmuls of its own by then: `lax.ragged_dot` takes the
place of these.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ladder_jax.parallel.collectives import unchecked

# of the result, and of each step's sum
WIDE = dict(columns=128, depth=32, num_warps=4, num_stages=4)
# as wide reads of the matrix as fit in 96 KiB
FEW_ROWS = dict(columns=64, depth=128, num_warps=4, num_stages=4)


def product(
    rows_RI: Array,
    weight_EIO: Array,
    sizes_E: Array,
    *,
    scale_EO: Array | None = None,
    transposed: bool = False,
    interpret: bool = False,
) -> Array:
    """[R, O]: each row times its group's matrix; undefined in the rows behind the last group.

    Sums are float32, multiplied by the columns' `scale` (of int8 matrices) and rounded to the rows'
    dtype once.
    transposed: the rows are [R, O], the result [R, I]. interpret: run without a GPU, slowly, to
        test the values.
    """
    count, _, _ = weight_EIO.shape
    height = min(128, max(16, pl.next_power_of_2(pl.cdiv(len(rows_RI), count))))
    form = dict(height=height, transposed=transposed, interpret=interpret)

    def call(rows, weight, sizes, scale):
        tiles = _tiles(sizes, rows=len(rows), height=height)
        return _product(rows, weight, tiles, scale, **form)

    return unchecked(call)(rows_RI, weight_EIO, sizes_E, scale_EO)


def over_rows(
    rows_RI: Array, gradient_RO: Array, sizes_E: Array, *, interpret: bool = False
) -> Array:
    """[E, I, O]: sums over each group's rows, in float32 and rounded to the rows' dtype once; zero
    of empty groups.
    """
    ends = jnp.cumsum(sizes_E)
    return unchecked(functools.partial(_over_rows, interpret=interpret))(
        rows_RI, gradient_RO, ends - sizes_E, ends
    )


def _tiles(sizes, *, rows, height):
    """(group, first row, end of the group) of each tile of at most `height` rows; the same row
    twice: an unused tile.

    There are as many as the sizes may ever need: each group that has rows may end in a tile that is
    not full.
    """
    count = (rows + min(rows, len(sizes)) * (height - 1)) // height
    ends = jnp.cumsum(sizes)
    last = jnp.cumsum(pl.cdiv(sizes, height))
    tile = jnp.arange(count, dtype=jnp.int32)
    passed = jnp.sum(last[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(passed, len(sizes) - 1)
    before = (last - pl.cdiv(sizes, height))[group]
    place = (ends - sizes)[group] + (tile - before) * height
    first = jnp.minimum(place, ends[group])
    return group, first, ends[group]


def _product(rows, weight, tiles, scale, *, height, transposed, interpret):
    columns, depth, num_warps, num_stages = (FEW_ROWS if height < 64 else WIDE).values()
    inner, outer = weight.shape[1:][::-1] if transposed else weight.shape[1:]

    def grouped_matmul(rows_ref, weight_ref, group_ref, first_ref, end_ref, *rest):
        *scales, out_ref = rest
        tile = pl.program_id(0)
        column = pl.program_id(1) * columns
        group = group_ref[tile]
        first = first_ref[tile]
        end = end_ref[tile]

        @pl.when(first < end)
        def _():
            mine = (first + jnp.arange(height) < end)[:, None]
            inside = (column + jnp.arange(columns) < outer)[None, :]

            def add(step, sums):
                at = step * depth
                left = (at + jnp.arange(depth) < inner)[None, :]
                a = _load(rows_ref, first, height, at, depth, mask=mine & left)
                if transposed:
                    b = _load(
                        weight_ref, column, columns, at, depth, mask=inside.T & left, lead=(group,)
                    )
                else:
                    b = _load(
                        weight_ref, at, depth, column, columns, mask=left.T & inside, lead=(group,)
                    )
                return sums + _dot(a, b.astype(a.dtype), 1, 1 if transposed else 0)

            sums = lax.fori_loop(
                0, pl.cdiv(inner, depth), add, jnp.zeros((height, columns), jnp.float32)
            )
            if scales:
                place = scales[0].at[group, pl.ds(column, columns)]
                sums = sums * triton.load(place, mask=inside[0], other=0)[None, :]
            place = out_ref.at[pl.ds(first, height), pl.ds(column, columns)]
            triton.store(place, sums.astype(out_ref.dtype), mask=mine & inside)

    return pl.pallas_call(
        grouped_matmul,
        out_shape=jax.ShapeDtypeStruct((len(rows), outer), rows.dtype),
        # tiles that share a matrix' columns one after the other
        grid=(len(tiles[0]), pl.cdiv(outer, columns)),
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="grouped_matmul",
    )(rows, weight, *tiles, *(() if scale is None else (scale,)))


def _over_rows(rows, gradient, first, ends, *, interpret):
    # of the result, and how many rows each step adds
    height = WIDE["columns"]
    depth = WIDE["depth"]
    inner = rows.shape[1]
    outer = gradient.shape[1]

    def grouped_matmul_over_rows(rows_ref, gradient_ref, first_ref, end_ref, out_ref):
        row = pl.program_id(0) * height
        column = pl.program_id(1) * height
        group = pl.program_id(2)
        first = first_ref[group]
        end = end_ref[group]
        upper = row + jnp.arange(height) < inner
        left = column + jnp.arange(height) < outer

        def add(step, sums):
            at = first + step * depth
            mine = (at + jnp.arange(depth) < end)[:, None]
            a = _load(rows_ref, at, depth, row, height, mask=mine & upper[None, :])
            b = _load(gradient_ref, at, depth, column, height, mask=mine & left[None, :])
            return sums + _dot(a, b, 0, 0)

        sums = lax.fori_loop(
            0, pl.cdiv(end - first, depth), add, jnp.zeros((height, height), jnp.float32)
        )
        place = out_ref.at[group, pl.ds(row, height), pl.ds(column, height)]
        triton.store(place, sums.astype(out_ref.dtype), mask=upper[:, None] & left[None, :])

    return pl.pallas_call(
        grouped_matmul_over_rows,
        out_shape=jax.ShapeDtypeStruct((len(first), inner, outer), rows.dtype),
        grid=(pl.cdiv(inner, height), pl.cdiv(outer, height), len(first)),
        compiler_params=triton.CompilerParams(
            num_warps=WIDE["num_warps"], num_stages=WIDE["num_stages"]
        ),
        interpret=interpret,
        name="grouped_matmul_over_rows",
    )(rows, gradient, first, ends)


def _load(ref, row, rows, column, columns, *, mask, lead=()):
    """A part of the last two dimensions, zero outside of the mask."""
    return triton.load(ref.at[*lead, pl.ds(row, rows), pl.ds(column, columns)], mask=mask, other=0)


def _dot(a, b, of_a, of_b):
    """The product over dimension `of_a` of a and `of_b` of b, in float32."""
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)
