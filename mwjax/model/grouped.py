"""Rows sorted into groups, each group multiplied by a matrix of its own: the products of a mixture of experts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

# What `_to_matrices` sums over: the rows, the first axis of both operands, group by group.
_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
# What the TPU kernel works on at once: rows, and bytes of each, of either operand. Its blocks and their float32 copies
# must fit into 16 MiB of fast memory (v5e).
TILE_ROWS, TILE_BYTES = 512, 2048


@jax.custom_vjp
def grouped_matmul(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Row r of ``rows`` [M, K] times the matrix of its group, of ``matrices`` [G, K, N]: [M, N] in the rows' dtype.

    sizes: int32 [G], rows of each group, in order from the first row on. What comes out for rows after the last group
    means nothing, in either direction: mask it.

    On TPUs the work grows with the rows in groups, not with M x G, in both directions. On CPUs XLA multiplies all rows
    by every matrix.
    """
    return jax.lax.ragged_dot(rows, matrices, sizes)


def _forward(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return grouped_matmul(rows, matrices, sizes), (rows, matrices, sizes)


def _backward(saved: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, matrices, sizes = saved
    to_rows = jax.lax.ragged_dot(gradient, matrices.swapaxes(1, 2), sizes)
    if rows.dtype == jnp.float64:  # which TPUs have not
        return to_rows, _to_matrices(rows, gradient, sizes), None
    on_tpu = partial(_to_matrices_tpu, interpret=False)
    return to_rows, jax.lax.platform_dependent(rows, gradient, sizes, tpu=on_tpu, default=_to_matrices), None


def _to_matrices(rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """For every group, the sum over its rows of ``rows`` [M, K] times ``gradient`` [M, N]: [G, K, N]."""
    return jax.lax.ragged_dot_general(rows, gradient, sizes, _OVER_ROWS)


def _to_matrices_tpu(rows: jax.Array, gradient: jax.Array, sizes: jax.Array, *, interpret: bool) -> jax.Array:
    """The same by the kernel that jax carries: XLA's TPU compiler (libtpu of jax 0.10.2) makes G dense products of it,
    32 times the work with 32 groups."""
    more = -len(rows) % TILE_ROWS
    rows, gradient = (jnp.pad(x, ((0, more), (0, 0))) for x in (rows, gradient))
    tiles = TILE_ROWS, *(min(TILE_BYTES // x.dtype.itemsize, x.shape[1]) for x in (rows, gradient))
    return tgmm(rows.T, gradient, sizes, rows.dtype, tiles, interpret=interpret)


grouped_matmul.defvjp(_forward, _backward)
